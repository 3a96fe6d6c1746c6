#include "self_test/rank.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/distributed.h>
#include <paceline/error.h>
#include <paceline/record.h>

#include "self_test/job.h"

namespace paceline::doctor {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void expect(bool is_right, const char* call, const at::Tensor& tensor) {
  if (is_right) return;
  throw Error(fmt::format("{} of {} bytes gave wrong values", call, tensor.nbytes()));
}

// The values differ by element and by rank, so a piece out of place is noticed. Sums are exact.
void test_values(std::int64_t elements) {
  const int rank = get_rank();
  const int size = get_world_size();
  const at::Tensor index = at::arange(elements, at::kFloat);

  const at::Tensor sum = index * (rank + 1);
  all_reduce(sum);
  expect(sum.equal(index * (size * (size + 1) / 2)), "all_reduce", sum);

  const at::Tensor copy = index + (rank + 1);
  broadcast(copy, {.src = size - 1});
  expect(copy.equal(index + size), "broadcast", copy);
  barrier();
}

// In microseconds, the median of a hundred.
double time_all_reduce() {
  constexpr int kCalls = 100;
  const at::Tensor tensor = at::full({1}, 1.0f);
  std::vector<double> times;
  for (int call = 0; call < kCalls; ++call) {
    tensor.fill_(1);
    barrier();
    const auto begin = Clock::now();
    all_reduce(tensor);
    times.push_back(seconds_since(begin) * 1e6);
  }
  std::ranges::nth_element(times, times.begin() + kCalls / 2);
  return times[kCalls / 2];
}

// The kernel may take a while until it moves ranks that started on one core apart.
double measure_all_reduce() {
  constexpr double kLeast = 0.05;
  const auto begin = Clock::now();
  const at::Tensor elapsed = at::zeros({1});
  double last = 0;
  while (elapsed.item<float>() < kLeast) {
    last = time_all_reduce();
    elapsed.fill_(seconds_since(begin));
    broadcast(elapsed);  // so that both ranks end together
  }
  return last;
}

void test_backend(const std::string& backend) {
  constexpr std::int64_t kMebibyte = (1 << 20) / sizeof(float);
  at::set_num_threads(1);
  const auto begin = Clock::now();
  const auto world = init_process_group({.backend = backend, .timeout = std::chrono::seconds(8)});
  Times times{.init_ms = seconds_since(begin) * 1e3};
  for (const std::int64_t elements : {std::int64_t{1}, std::int64_t{1000}, kMebibyte}) {
    test_values(elements);
  }
  times.all_reduce_us = measure_all_reduce();
  if (get_rank() == 0) std::fputs(to_line(times).c_str(), stdout);
}

}  // namespace

int run_self_test_rank(const std::string& backend) {
  return record([&] { test_backend(backend); });
}

}  // namespace paceline::doctor
