// The program of spawn_test: its first argument says what it does.
#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <pthread.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/paceline.h>

#include "support/small_net.h"

namespace {

using namespace std::chrono_literals;

// In one write, since processes share the stream.
template <typename... Args>
void say(fmt::format_string<Args...> format, Args&&... args) {
  const std::string line = fmt::format(format, std::forward<Args>(args)...) + "\n";
  if (::write(STDOUT_FILENO, line.data(), line.size()) < 0) std::abort();
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "unset" : value;
}

// Whether the process has ended, if only its parent does not know yet.
bool has_ended(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string stat;
  std::getline(file, stat);  // an iterator throws if the process ends meanwhile
  const auto name_end = stat.rfind(')');
  return name_end == std::string::npos || stat.at(name_end + 2) == 'Z';
}

// Calls spawn and says what it throws.
template <typename... Args>
void spawn_and_tell(Args&&... args) {
  try {
    paceline::spawn(std::forward<Args>(args)...);
    say("spawn returned");
  } catch (const paceline::ProcessExitedException& error) {
    say("exited: rank {}, code {}, signal '{}': {}", error.error_index(), error.exit_code(),
        error.signal_name(), error.what());
  } catch (const paceline::ProcessRaisedException& error) {
    say("raised: rank {}: {}", error.error_index(), error.what());
  } catch (const paceline::UsageError& error) {
    say("usage: {}", error.what());
  } catch (const paceline::Error& error) {
    say("error: {}", error.what());
  }
}

using Arguments = std::vector<std::string>;

void in_world(const std::function<void(int)>& body) {
  const auto world = paceline::init_process_group();
  body(paceline::get_rank());
}

void ranks(const Arguments& arguments) {
  const int count = std::stoi(arguments.at(0));
  const auto greet = [&](int rank, const std::string& word, std::unique_ptr<int> number) {
    in_world([&](int world_rank) {
      const auto sum = torch::full({1}, rank + 1);
      paceline::all_reduce(sum);
      say("rank {}={}/{} local {} node {} sum {} {} {} arguments {} stdin {}", rank, world_rank,
          paceline::get_world_size(), paceline::get_local_rank(), paceline::get_node_rank(),
          sum.item<int>(), word, *number, fmt::join(arguments, "|"), ::getc(stdin));
      say("rank {} stderr {}", rank, std::filesystem::read_symlink("/proc/self/fd/2").string());
    });
  };
  paceline::spawn(greet, {.nprocs = count}, "hello", std::make_unique<int>(42));
  say("parent goes on");
}

void train(int rank) {
  auto net = paceline::test::make_net(torch::kFloat, static_cast<std::uint64_t>(rank));
  paceline::DistributedDataParallel model(net);
  torch::optim::Adam adam(model.parameters());
  for (int step = 0; step < 5; ++step) {
    adam.zero_grad();
    const auto x = paceline::test::batch_of(rank, step, torch::kFloat);
    paceline::test::loss_of(model(x), x).backward();
    adam.step();
  }
  std::uint64_t hash = 14695981039346656037U;
  for (const char byte : paceline::test::bytes_of(net->parameters())) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 1099511628211U;
  }
  if (rank == 0) say("parameters {:016x}", hash);
}

void fail(const Arguments& arguments) {
  const std::string& how = arguments.at(0);
  const auto function = [&](int rank) {
    in_world([&](int) {
      paceline::barrier();
      if (rank == 1) {
        if (how == "raise") throw std::runtime_error("the disk\nis full");
        if (how == "raise-torch") TORCH_CHECK(false, "no such tensor");
        if (how == "raise-int") throw 7;
        if (how == "kill") ::raise(SIGKILL);
        if (how == "exit") ::_exit(7);
        if (how == "exit-0") std::exit(0);
        if (how == "exit-75") ::_exit(75);
      }
      paceline::barrier();
    });
  };
  spawn_and_tell(function, paceline::SpawnOptions{.nprocs = 3});
}

// Rank 1 fails, but ends only when rank 0, which notices, has ended.
void follower(const Arguments&) {
  static pid_t first = 0;
  spawn_and_tell(
      [](int rank) {
        in_world([&](int) {
          const auto pids = paceline::all_gather_bytes(std::to_string(::getpid()));
          first = std::stoi(pids[0]);
          if (rank == 1) {
            std::atexit([] {
              while (!has_ended(first)) std::this_thread::sleep_for(1ms);
            });
            throw std::runtime_error("the real reason");
          }
          paceline::barrier();
        });
      },
      paceline::SpawnOptions{.nprocs = 2, .failure_grace = 60s});
}

void stubborn(const Arguments&) {
  spawn_and_tell(
      [](int rank) {
        in_world([&](int) {
          ::signal(SIGTERM, SIG_IGN);
          paceline::barrier();
          if (rank == 0) throw std::runtime_error("enough");
        });
        for (;;) ::pause();
      },
      paceline::SpawnOptions{.nprocs = 2, .failure_grace = 10ms, .stop_grace = 50ms});
}

void hang(const Arguments&) {
  say("parent={}", ::getpid());
  paceline::spawn(
      [](int rank) {
        say("rank{}={}", rank, ::getpid());
        for (;;) ::pause();
      },
      {.nprocs = 2});
}

void twice(const Arguments&) {
  for (const char* word : {"first", "second"}) {
    paceline::spawn([&](int rank) { in_world([&](int) { say("{} {}", word, rank); }); },
                    {.nprocs = 2});
    say("parent after {}", word);
  }
}

// After a failure, the second call is on a path that the spawned processes do not take.
void retry(const Arguments&) {
  try {
    paceline::spawn([](int) { throw std::runtime_error("first"); });
  } catch (const paceline::ProcessRaisedException&) {
    spawn_and_tell([](int) {}, paceline::SpawnOptions{.nprocs = 2});
  }
}

// main has changed its arguments.
void overwritten(const Arguments& arguments) {
  paceline::spawn([&](int rank) { say("rank {} got {}", rank, arguments.at(0)); }, {.nprocs = 2});
}

// A record before this one has failed. The spawned processes end before the call.
void second_record(const Arguments&) {
  if (std::getenv("PACELINE_SPAWN") != nullptr) return;
  spawn_and_tell([](int) {}, paceline::SpawnOptions{.nprocs = 2});
}

// The spawned processes have a file of their own under the number of an inherited descriptor.
void reused_descriptor(const Arguments& arguments) {
  if (std::getenv("PACELINE_SPAWN") != nullptr) {
    const int file = ::open(arguments.at(0).c_str(), O_RDWR);
    ::dup2(file, std::stoi(variable("PACELINE_ERROR_FD")));
  }
  spawn_and_tell([](int) {});
}

// The ranks leave the world of main by the end of the function, one of them early.
void world_in_main(const Arguments&) {
  const auto world = paceline::init_process_group();
  static pid_t first = 0;
  paceline::spawn(
      [](int rank) {
        first = std::stoi(paceline::all_gather_bytes(std::to_string(::getpid()))[0]);
        if (rank == 0) return;
        while (!has_ended(first)) std::this_thread::sleep_for(1ms);
        try {
          paceline::barrier();
        } catch (const paceline::PeerLost& error) {
          say("{}", error.what());
        }
      },
      {.nprocs = 2});
}

// A rank starts a program that calls spawn.
void inner_program(const Arguments& arguments) {
  paceline::spawn([&](int) { std::exit(std::system((arguments.at(0) + " ranks 2").c_str())); });
}

void nested(const Arguments&) {
  spawn_and_tell([](int) { paceline::spawn([](int) {}); });
}

void swallow(const Arguments&) {
  try {
    paceline::spawn([](int) { throw std::runtime_error("still told"); });
  } catch (const paceline::ProcessRaisedException& error) {
    say("raised: {}", error.what());
  } catch (...) {
    say("rank runs on");
  }
}

void catch_errors(const Arguments&) {
  try {
    paceline::spawn([](int) { throw std::runtime_error("not for the parent's handlers"); });
  } catch (const std::exception& error) {
    say("caught in {}: {}", variable("RANK"), error.what());
  }
}

void invalid(const Arguments&) {
  for (const int nprocs : {0, -1, 1025}) {
    spawn_and_tell([](int) {}, paceline::SpawnOptions{.nprocs = nprocs});
  }
  spawn_and_tell([](int) {}, paceline::SpawnOptions{.failure_grace = -1ms});
  spawn_and_tell([](int) {}, paceline::SpawnOptions{.stop_grace = -1ms});
  std::thread([] { spawn_and_tell([](int) {}); }).join();
}

std::vector<std::string> descriptors() {
  std::vector<std::string> open;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    open.push_back(entry.path().filename().string());
  }
  std::ranges::sort(open);
  return open;
}

// What a call leaves in this process. The answer of a second call is compared, since the first may
// load something.
std::string traces() {
  sigset_t mask;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  std::string text = fmt::format("descriptors {}, child {}", fmt::join(descriptors(), " "),
                                 ::waitpid(-1, nullptr, WNOHANG));
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    text += fmt::format(" {}{}", sigismember(&mask, signal) == 1 ? "blocked " : "",
                        reinterpret_cast<std::uintptr_t>(action.sa_handler));
  }
  return text;
}

void leave_nothing(const Arguments&) {
  const std::string before = traces();
  paceline::spawn([](int) { in_world([](int) { paceline::barrier(); }); }, {.nprocs = 3});
  say("after success: {}", traces() == before ? "nothing" : traces() + " was " + before);
  fail({"raise"});
  say("after failure: {}", traces() == before ? "nothing" : traces() + " was " + before);
}

// With SIGCHLD as the argument says.
void with_sigchld(const Arguments& arguments) {
  if (std::getenv("PACELINE_SPAWN") == nullptr) {
    if (arguments.at(0) == "ignored") ::signal(SIGCHLD, SIG_IGN);
    if (arguments.at(0) == "thief") {
      ::signal(SIGCHLD, [](int) {
        while (::waitpid(-1, nullptr, WNOHANG) > 0) {
        }
      });
    }
  }
  spawn_and_tell(
      [](int rank) {
        say("rank{}={}", rank, ::getpid());
        if (rank == 1) ::_exit(7);
        for (;;) ::pause();
      },
      paceline::SpawnOptions{.nprocs = 2, .failure_grace = 0ms});
  struct sigaction action {};
  ::sigaction(SIGCHLD, nullptr, &action);
  say("{}", action.sa_handler == SIG_IGN ? "ignored still" : "not ignored");
}

// Threads that hold malloc's locks, and LibTorch's own, in the parent at each start.
void with_threads(const Arguments&) {
  const bool is_parent = std::getenv("PACELINE_SPAWN") == nullptr;
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  if (is_parent) {
    at::set_num_threads(4);
    torch::ones({1000, 1000}).add(1).sum();
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&] {
        while (!stop) std::vector<std::string>(100, std::string(100, 'x')).clear();
      });
    }
  }
  paceline::spawn([](int) { in_world([](int) { paceline::barrier(); }); }, {.nprocs = 4});
  stop = true;
  for (auto& thread : threads) thread.join();
  say("parent goes on");
}

void environment(const Arguments&) {
  paceline::spawn(
      [](int rank) {
        std::string text = fmt::format("inner {}", rank);
        for (const char* name :
             {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK",
              "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "PACELINE_TERMINAL",
              "PACELINE_BOOTSTRAP_SOCKETS", "PACELINE_TIMELINE", "OMP_NUM_THREADS",
              "MALLOC_TRIM_THRESHOLD_"}) {
          text += fmt::format(" {}={}", name, variable(name));
        }
        in_world([&](int) { say("{} open {}", text, fmt::join(descriptors(), " ")); });
      },
      {.nprocs = std::getenv("ONE") != nullptr ? 1 : 2});
}

// A process that is stopped does not get the processor, as on a machine that is stalled.
void stop_once() {
  static bool stopped = false;
  if (std::exchange(stopped, true)) return;
  say("trial={}", ::getpid());
  ::raise(SIGSTOP);
}

// Forks without exec, after the given preparation, and enters a world in the child.
void forked(const Arguments& arguments) {
  const std::string& after = arguments.at(0);
  const auto use_threads = [] { torch::ones({1000, 1000}).add_(1); };
  at::set_num_threads(4);
  if (after == "use" || after == "use-then-one-thread") use_threads();
  if (after == "use-on-another-thread") std::thread(use_threads).join();
  if (after == "cuda" && ::dlopen(arguments.at(1).c_str(), RTLD_LAZY | RTLD_LOCAL) == nullptr) {
    throw std::runtime_error(::dlerror());
  }
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      if (after == "use-then-one-thread") at::set_num_threads(1);
      if (after == "stalled") ::pthread_atfork(nullptr, nullptr, &stop_once);
      for (int i = 0; i < 2; ++i) in_world([&](int) { use_threads(); });
      say("child works");
    } catch (const paceline::UsageError& error) {
      say("usage: {}", error.what());
    }
    std::_Exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  say("child ended with {}", status);
}

const std::map<std::string, void (*)(const Arguments&)> kModes{
    {"ranks", ranks},
    {"train",
     [](const Arguments&) { paceline::spawn([](int) { in_world(train); }, {.nprocs = 2}); }},
    {"train-launched", [](const Arguments&) { in_world(train); }},
    {"fail", fail},
    {"follower", follower},
    {"stubborn", stubborn},
    {"hang", hang},
    {"twice", twice},
    {"retry", retry},
    {"overwritten", overwritten},
    {"second-record", second_record},
    {"reused-descriptor", reused_descriptor},
    {"nested", nested},
    {"inner-program", inner_program},
    {"world-in-main", world_in_main},
    {"swallow", swallow},
    {"catch-errors", catch_errors},
    {"invalid", invalid},
    {"leave-nothing", leave_nothing},
    {"sigchld", with_sigchld},
    {"threads", with_threads},
    {"environment", environment},
    {"forked", forked},
};

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const Arguments arguments(argv + 2, argv + argc);
  if (mode == "outside-record") {
    spawn_and_tell([](int) {});
    return 0;
  }
  if (mode == "overwritten") std::strtok(argv[2], ",");
  if (mode == "second-record") {
    static_cast<void>(paceline::record([] { throw std::runtime_error("first"); }));
  }
  const int code = paceline::record([&] { kModes.at(mode)(arguments); });
  if (mode == "twice") {
    return paceline::record([&] { say("second record"); }) + code;
  }
  return code;
}
