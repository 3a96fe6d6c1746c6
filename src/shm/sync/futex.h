#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace paceline::shm {

using Word = std::atomic<std::uint32_t>;
static_assert(sizeof(Word) == sizeof(std::uint32_t) && Word::is_always_lock_free);

// Sleeps while `word` holds `value`, at most `limit`; wakes early for a signal too.
void futex_wait(const Word& word, std::uint32_t value, std::chrono::nanoseconds limit);
void futex_wake_all(const Word& word);

}  // namespace paceline::shm
