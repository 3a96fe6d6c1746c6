#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace paceline::bench {

// The most bytes of tensors on the CPU that each thread had allocated and not freed again while
// `body` ran, in descending order. Memory that a thread frees for another counts for neither.
std::vector<std::int64_t> peak_memory_by_thread(const std::function<void()>& body);

}  // namespace paceline::bench
