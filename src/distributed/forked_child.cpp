#include "distributed/forked_child.h"

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <poll.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>

#include <paceline/error.h>

#include "base/deadline.h"
#include "base/errno_error.h"
#include "base/pipe.h"
#include "base/process_stat.h"
#include "shm/sync/fork_generation.h"

namespace paceline::distributed {
namespace {

constexpr const char* kAdvice =
    "Start ranks with paceline::spawn or `paceline run`, which start new processes";

// Whether the CUDA driver works in this process, without loading or initializing it.
bool is_cuda_initialized() {
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return false;
  using GetCount = int (*)(int*);
  const auto get_count = reinterpret_cast<GetCount>(::dlsym(driver, "cuDeviceGetCount"));
  int count = 0;
  const bool works = get_count != nullptr && get_count(&count) == 0;
  ::dlclose(driver);
  return works;
}

// From before the first fork on.
struct Forks {
  Forks() {
    ::pthread_atfork([] { instance.cuda_at_fork |= is_cuda_initialized(); }, nullptr, nullptr);
  }
  static Forks instance;

  bool cuda_at_fork = false;  // any of this process or of those that it was forked from
  shm::OwningProcess loaded_by{};
  shm::OwningProcess checked_by{};
};
Forks Forks::instance;

// Whether a process that ought to end hangs. It may have to wait for the processor: so it hangs
// only if it slept at all of several looks, or if it used the processor for seconds, since OpenMP's
// threads may spin while they wait.
class HangDetector {
 public:
  explicit HangDetector(pid_t process) : process_(process) {}

  // Call once a second.
  bool look() {
    const auto stat = base::stat_of(process_);
    const long used = stat ? static_cast<long>(stat->user_ticks + stat->system_ticks) : used_;
    const bool rests = used == used_ && base::is_asleep(process_);
    used_ = used;
    looks_asleep_ = rests ? looks_asleep_ + 1 : 0;
    return looks_asleep_ == kSeconds || used_ >= kSeconds * ::sysconf(_SC_CLK_TCK);
  }

 private:
  static constexpr int kSeconds = 5;

  pid_t process_;
  long used_ = 0;
  int looks_asleep_ = 0;
};

// OpenMP's library does not say whether the thread that forked had threads, which the child would
// wait for. So a copy of this process runs a parallel operator, and is killed if it hangs.
bool intraop_threads_work() {
  constexpr std::chrono::seconds kSecond{1};
  constexpr std::int64_t kElementsOfThread = 1 << 16;  // LibTorch starts one for half as many
  base::Pipe pipe = base::make_pipe();
  const pid_t copy = ::fork();
  if (copy < 0) throw base::errno_error("init_process_group in a forked child cannot fork");
  if (copy == 0) {
    at::zeros({at::get_num_threads() * kElementsOfThread}).add_(1);
    const ssize_t written = ::write(pipe.write_end.get(), "", 1);
    ::_exit(written == 1 ? 0 : 1);
  }
  pipe.write_end.reset();
  HangDetector detector(copy);
  pollfd answer{pipe.read_end.get(), POLLIN, 0};
  auto next_look = base::Deadline::after(kSecond);
  while (::poll(&answer, 1, static_cast<int>(next_look.remaining().count())) <= 0) {
    if (!next_look.expired()) continue;
    if (detector.look()) break;
    next_look = base::Deadline::after(kSecond);
  }
  char byte = 0;
  const bool works = (answer.revents & POLLIN) != 0 && ::read(answer.fd, &byte, 1) == 1;
  ::kill(copy, SIGKILL);
  while (::waitpid(copy, nullptr, 0) < 0 && errno == EINTR) {
  }
  return works;
}

}  // namespace

void check_forked_child() {
  Forks& forks = Forks::instance;
  if (!forks.loaded_by.is_forked_child()) return;
  if (forks.cuda_at_fork) {
    throw UsageError(fmt::format(
        "init_process_group in a forked child of a process that had initialized CUDA, which does "
        "not work in forked children. {}",
        kAdvice));
  }
  const int threads = at::get_num_threads();
  if (threads == 1 || !forks.checked_by.is_forked_child()) return;
  if (!intraop_threads_work()) {
    throw UsageError(fmt::format(
        "init_process_group in a forked child of a thread that had used LibTorch's intra-op "
        "threads: the child does not have them, and with at::get_num_threads() = {} its next "
        "parallel operator would wait for them for ever. {}; or call at::set_num_threads(1) in the "
        "child first",
        threads, kAdvice));
  }
  forks.checked_by = {};
}

}  // namespace paceline::distributed
