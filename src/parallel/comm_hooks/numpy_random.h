#pragma once

#include <cstdint>
#include <locale>
#include <random>
#include <sstream>
#include <string>

namespace paceline::comm_hooks {

// The random numbers of numpy.random.RandomState(seed).
class NumpyRandom {
 public:
  explicit NumpyRandom(std::uint32_t seed) : engine_(seed) {}

  // randint(1_000_000_000): 30 bits of a number, of the first one that is in the range.
  std::uint32_t below_1e9() {
    constexpr std::uint32_t kMask = (1U << 30) - 1;
    while (true) {
      const auto value = static_cast<std::uint32_t>(engine_()) & kMask;
      if (value < 1'000'000'000) return value;
    }
  }

  std::string state() const {
    std::ostringstream text;
    text.imbue(std::locale::classic());
    text << engine_;
    return text.str();
  }
  // Whether `state` is of state().
  bool set_state(const std::string& state) {
    std::istringstream text(state);
    text.imbue(std::locale::classic());
    return static_cast<bool>(text >> engine_);
  }

 private:
  std::mt19937 engine_;
};

}  // namespace paceline::comm_hooks
