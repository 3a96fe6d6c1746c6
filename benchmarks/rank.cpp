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

void call(const std::string& what) {
  static const at::Tensor small = at::ones({16});
  static const at::Tensor large = at::ones({1 << 20});
  if (what == "all_reduce") {
    all_reduce(large);
  } else if (what == "asynchronous") {
    all_reduce_async(large).wait();
  } else if (what == "messages") {  // around a ring: most ranks wait for one that waits itself
    const int size = get_world_size();
    Work sent = send_async(small, (get_rank() + 1) % size);
    recv(small, {.src = (get_rank() + size - 1) % size});
    sent.wait();
  } else {
    barrier();
  }
}

// Calls until another rank is lost, and prints when this rank noticed, in nanoseconds of
// CLOCK_MONOTONIC.
void call_until_told(const std::string& what) {
  at::set_num_threads(1);
  call(what);  // ranks of different machines connect then
  std::puts("ready");
  std::fflush(stdout);
  try {
    while (true) call(what);
  } catch (const PeerLost&) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    std::printf("%lld\n", static_cast<long long>(std::chrono::nanoseconds(now).count()));
  }
}

}  // namespace

// A rank of benchmarks/start_up (load: no more than LibTorch; meet: join, meet once and leave) or
// benchmarks/lost_rank (what to call all the time).
int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "meet";
  if (what == "load") return at::get_num_threads() > 0 ? 0 : 1;
  return record([&] {
    const auto world = init_process_group();
    barrier();
    if (what != "meet") call_until_told(what);
  });
}
