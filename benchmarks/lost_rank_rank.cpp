#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <paceline/collectives.h>
#include <paceline/distributed.h>
#include <paceline/record.h>

#include <chrono>
#include <cstdio>
#include <string>

#include <paceline/error.h>

namespace {

using namespace paceline;

// One round of what benchmarks/lost_rank interrupts.
void act(const std::string& activity) {
  static const at::Tensor small = at::ones({16});
  static const at::Tensor large = at::ones({1 << 20});
  if (activity == "all_reduce") {
    all_reduce(large);
  } else if (activity == "asynchronous") {
    all_reduce_async(large).wait();
  } else if (activity == "barrier") {
    barrier();
  } else {  // around a ring: most ranks wait for one that waits itself
    const int next = (get_rank() + 1) % get_world_size();
    Work sent = send_async(small, next);
    recv(small, {.src = (get_rank() + get_world_size() - 1) % get_world_size()});
    sent.wait();
  }
}

void run(const std::string& activity) {
  at::set_num_threads(1);
  const auto world = init_process_group();
  barrier();
  std::puts("ready");
  std::fflush(stdout);
  try {
    while (true) act(activity);
  } catch (const PeerLost&) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    std::printf("%lld\n", static_cast<long long>(
                              std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()));
  }
}

}  // namespace

// What benchmarks/lost_rank starts: says when it is ready, and at what time of CLOCK_MONOTONIC, in
// nanoseconds, it was told that a rank is lost.
int main(int argc, char** argv) {
  return paceline::record([&] { run(argc > 1 ? argv[1] : "all_reduce"); });
}
