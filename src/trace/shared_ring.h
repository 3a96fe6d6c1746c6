#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace paceline::trace {

using Word = std::atomic<std::uint64_t>;

// The last kRecords records, of kWords words each, in memory that several processes map. Zeros are
// an empty ring. A page of it uses memory only once it is touched.
template <std::size_t kWords, std::size_t kRecords>
struct SharedRing {
  static constexpr std::size_t kCapacity = kRecords;
  using Values = std::array<std::uint64_t, kWords>;

  struct alignas(64) Record {
    Word number{};  // counted from 1; 0 while it is written
    std::array<Word, kWords> words{};
  };

  alignas(64) Word count{};  // how many were written
  std::array<Record, kRecords> records{};
};

// Only writes, so other processes cannot disturb this one through the memory. One thread at a time.
template <typename Ring>
class RingWriter {
 public:
  explicit RingWriter(Ring& ring) : ring_(ring) {}

  void write(const typename Ring::Values& values) noexcept {
    auto& record = ring_.records[count_ % Ring::kCapacity];
    record.number.store(0, std::memory_order_relaxed);
    // A reader that sees one of these words sees the 0 too, or what follows it.
    for (std::size_t i = 0; i < values.size(); ++i) {
      record.words[i].store(values[i], std::memory_order_release);
    }
    record.number.store(++count_, std::memory_order_release);
    ring_.count.store(count_, std::memory_order_release);
  }

 private:
  Ring& ring_;
  std::uint64_t count_ = 0;
};

// Trusts nothing in the memory: it reads at most kCapacity records at a time, and drops those that
// are being overwritten.
template <typename Ring>
class RingReader {
 public:
  // Starts with the next record that is written, or with the oldest that is left.
  enum class Start { next, oldest };
  RingReader(const Ring& ring, Start start)
      : ring_(ring), next_(start == Start::next ? ring.count.load(std::memory_order_acquire) : 0) {}

  // Calls `take` for each record that was written since the last call, the oldest first.
  template <typename Take>
  void read(Take take) {
    const std::uint64_t count = ring_.count.load(std::memory_order_acquire);
    if (count < next_) next_ = count;
    if (count - next_ > Ring::kCapacity) {
      lost_ += count - next_ - Ring::kCapacity;
      next_ = count - Ring::kCapacity;
    }
    for (; next_ != count; ++next_) {
      const auto& record = ring_.records[next_ % Ring::kCapacity];
      typename Ring::Values values;
      bool whole = record.number.load(std::memory_order_acquire) == next_ + 1;
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = record.words[i].load(std::memory_order_acquire);
      }
      whole = whole && record.number.load(std::memory_order_relaxed) == next_ + 1;
      if (whole) {
        take(values);
      } else {
        ++lost_;
      }
    }
  }

  // How many records were overwritten before they were read.
  std::uint64_t lost() const { return lost_; }

 private:
  const Ring& ring_;
  std::uint64_t next_;  // how many were read or lost
  std::uint64_t lost_ = 0;
};

}  // namespace paceline::trace
