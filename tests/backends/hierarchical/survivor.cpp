// A rank that works until another one fails, and then says what it was told.
//
//   survivor WORK [SECONDS [FORMING]]
//
// WORK: all_reduce, messages, new_group, ddp; late: rank 1 hangs after some calls; unsent: ranks
// wait for messages between ranks 1 and 2; first: rank 1 takes its first messages 12 s late; never:
// it hangs before that; monitored: rank 1 does not come to the barrier. SECONDS: the timeout of
// calls, by default 1000. FORMING: that of forming the world, by default the same.
//
// Prints "ready PID" once it works, and at the end the error's type, its ranks and its text.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include <paceline/paceline.h>

#include "support/small_net.h"

namespace {

using namespace std::chrono_literals;

void reduce() {
  const auto small = torch::ones({10});
  const auto large = torch::ones({300'000});
  paceline::all_reduce(small);
  paceline::all_reduce(large);
  paceline::broadcast(large, {.src = 1});
}

// To the next rank, from the one before: the ranks of several nodes in one ring.
void send_around() {
  const int size = paceline::get_world_size();
  const int rank = paceline::get_rank();
  auto got = torch::empty({100'000});
  const auto given = torch::full({100'000}, static_cast<float>(rank));
  auto sending = paceline::send_async(given, (rank + 1) % size);
  paceline::recv(got, {.src = (rank + size - 1) % size});
  sending.wait();
}

void make_group() {
  const auto group = paceline::new_group();
  paceline::barrier({.group = group});
  paceline::destroy_process_group(group);
}

// By rank 1, of all others.
void take_first_messages() {
  auto tensor = torch::ones({10});
  if (paceline::get_rank() != 1) return paceline::send(tensor, 1);
  std::this_thread::sleep_for(12s);
  for (int rank = 0; rank < paceline::get_world_size(); ++rank) {
    if (rank != 1) paceline::recv(tensor, {.src = rank});
  }
}

class Training {
 public:
  void step() {
    sgd_.zero_grad();
    const auto x = paceline::test::batch_of(paceline::get_rank(), 0, at::kFloat);
    paceline::test::loss_of(model_(x), x).backward();
    sgd_.step();
  }

 private:
  paceline::DistributedDataParallel<paceline::test::NetImpl> model_{
      paceline::test::make_net(at::kFloat)};
  torch::optim::SGD sgd_{model_.parameters(), 1e-9};
};

std::function<void()> work_of(const std::string& name) {
  if (name == "all_reduce") return reduce;
  if (name == "messages") return send_around;
  if (name == "new_group") return make_group;
  if (name == "ddp") {
    return [training = std::make_shared<Training>()] { training->step(); };
  }
  if (name == "late") {
    return [calls = 0]() mutable {
      if (++calls == 3 && paceline::get_rank() == 1) std::this_thread::sleep_for(1h);
      paceline::barrier();
    };
  }
  if (name == "unsent") {
    return [is_first = true]() mutable {
      if (std::exchange(is_first, false)) return paceline::barrier();
      auto got = torch::empty({10});
      paceline::recv(got, {.src = paceline::get_rank() == 2 ? 1 : 2});
    };
  }
  if (name == "first") return take_first_messages;
  if (name == "never") {
    return [sending = std::make_shared<paceline::Work>(), is_first = true]() mutable {
      if (!std::exchange(is_first, false)) {
        if (paceline::get_rank() == 1) std::this_thread::sleep_for(1h);
        return sending->wait();
      }
      paceline::barrier();
      if (paceline::get_rank() != 1) *sending = paceline::send_async(torch::ones({10}), 1);
    };
  }
  if (name == "monitored") {
    return [is_first = true]() mutable {
      if (std::exchange(is_first, false)) return paceline::barrier();
      if (paceline::get_rank() == 1) std::this_thread::sleep_for(1h);
      paceline::monitored_barrier();
    };
  }
  throw std::invalid_argument(name);
}

void say(const char* type, const paceline::PeerError& error) {
  fmt::print("{} ranks=[{}] {}\n", type, fmt::join(error.ranks(), ","), error.what());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  try {
    const std::chrono::seconds timeout(argc > 2 ? std::stoi(argv[2]) : 1000);
    const std::chrono::seconds forming =
        argc > 3 ? std::chrono::seconds(std::stoi(argv[3])) : timeout;
    const auto world = paceline::init_process_group({.timeout = forming});
    paceline::ProcessGroup().c10d()->setTimeout(timeout);
    const auto work = work_of(argv[1]);
    work();
    fmt::print("ready {}\n", ::getpid());
    std::fflush(stdout);
    for (;;) work();
  } catch (const paceline::PeerLost& error) {
    say("PeerLost", error);
  } catch (const paceline::Timeout& error) {
    say("Timeout", error);
  } catch (const paceline::Mismatch& error) {
    say("Mismatch", error);
  }
}
