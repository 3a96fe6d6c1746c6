#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace paceline::doctor {

// How long two ranks took, as rank 0 says.
struct Times {
  double init_ms = 0;
  double all_reduce_us = 0;  // of 4 bytes, the median
};

struct SelfTest {
  std::string backend{};
  std::optional<Times> times{};  // set if it passed
  std::string error{};           // otherwise why it did not
  int signal = 0;                // that this process got meanwhile, and that should end it
};

// What rank 0 writes to its standard output, and what is read of that. nullopt for other text.
std::string to_line(const Times& times);
std::optional<Times> from_line(const std::string& line);

// Runs `command` as two ranks that test `backend`. They are ended at the deadline. Uses SIGALRM.
SelfTest run_self_test(const std::string& backend, const std::vector<std::string>& command,
                       std::chrono::seconds deadline);

}  // namespace paceline::doctor
