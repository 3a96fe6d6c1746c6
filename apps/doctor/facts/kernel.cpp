#include "facts/kernel.h"

#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <random>
#include <system_error>

#include "base/errno_error.h"
#include "base/open_pidfd.h"
#include "shm/membership/socket.h"
#include "shm/memory/mapping.h"

namespace paceline::doctor {
namespace {

namespace fs = std::filesystem;

template <typename Action>
std::string failure_of(Action action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

void map_sealed_memory() {
  constexpr std::size_t kPage = 4096;
  const shm::Mapping mapping(shm::Mapping::create_memory(kPage));
}

void open_own_pidfd() {
  const base::UniqueFd fd = base::open_pidfd(::getpid());
  if (!fd) throw base::errno_error("pidfd_open failed");
}

// Not private to the process, as between ranks.
void wake_nobody() {
  std::uint32_t word = 0;
  if (::syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0) != 0) {
    throw base::errno_error("futex failed");
  }
}

// As ranks connect to rank 0.
void send_credentials() {
  const auto deadline = base::Deadline::after(std::chrono::seconds(1));
  std::random_device random;
  const std::string name = fmt::format("paceline-doctor-{:08x}{:08x}", random(), random());
  const base::UniqueFd listener = shm::listen_abstract(name);
  const base::UniqueFd near = shm::connect_abstract(name);
  const base::UniqueFd far = shm::accept_from_same_user(listener.get());
  if (!near || !far) throw Error("cannot connect to an abstract Unix socket of this process");
  shm::want_credentials(far.get());
  shm::send_packet(near.get(), "x", {}, deadline);
  const shm::Packet packet = shm::receive_packet(far.get(), 1);
  if (packet.pid == ::getpid()) return;
  throw Error(fmt::format("a Unix socket says that process {} sent what process {} did", packet.pid,
                          ::getpid()));
}

void become_subreaper() {
  int before = 0;
  ::prctl(PR_GET_CHILD_SUBREAPER, &before);
  if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) throw base::errno_error("prctl failed");
  ::prctl(PR_SET_CHILD_SUBREAPER, before);
}

void read_own_process() {
  for (const char* const path : {"/proc/self/exe", "/proc/self/fd"}) {
    if (!fs::exists(path)) throw Error(fmt::format("{} does not exist", path));
  }
}

// As a launcher does for the error files of its ranks.
void make_temporary_directory() {
  std::error_code error;
  const fs::path parent = fs::temp_directory_path(error);
  std::string name = (error ? fs::path("/tmp") : parent) / "paceline-XXXXXX";
  if (::mkdtemp(name.data()) == nullptr) throw base::errno_error("cannot create " + name);
  if (::rmdir(name.c_str()) != 0) throw base::errno_error("cannot remove " + name);
}

// A child reads this process's memory, since Yama lets a process read that of its descendants.
int read_from_a_child() {
  volatile std::uint32_t source = 42;
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) return errno;
  if (child == 0) {
    std::uint32_t copy = 0;
    const iovec local{&copy, sizeof(copy)};
    const iovec remote{const_cast<std::uint32_t*>(&source), sizeof(source)};
    const bool copied = ::process_vm_readv(parent, &local, 1, &remote, 1, 0) == sizeof(copy);
    ::_exit(copied ? 0 : errno);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : ECHILD;
}

void read_between_processes() {
  if (const int code = read_from_a_child(); code != 0) {
    throw base::errno_error("process_vm_readv from another process of this user failed", code);
  }
}

std::optional<int> read_ptrace_scope() {
  std::ifstream file("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  return file >> scope ? std::optional(scope) : std::nullopt;
}

}  // namespace

KernelFacts probe_kernel() {
  KernelFacts facts;
  facts.sealed_memfd = failure_of(map_sealed_memory);
  facts.pidfd = failure_of(open_own_pidfd);
  facts.futex = failure_of(wake_nobody);
  facts.credentials = failure_of(send_credentials);
  facts.subreaper = failure_of(become_subreaper);
  facts.proc = failure_of(read_own_process);
  facts.temporary_files = failure_of(make_temporary_directory);
  facts.single_copy = failure_of(read_between_processes);
  facts.ptrace_scope = read_ptrace_scope();
  return facts;
}

}  // namespace paceline::doctor
