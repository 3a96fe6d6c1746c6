#pragma once

#include <optional>
#include <string>

namespace paceline::doctor {

// What Paceline asks of the kernel, tried out: why it does not work here, empty if it does.
struct KernelFacts {
  std::string sealed_memfd{};
  std::string pidfd{};
  std::string futex{};
  std::string credentials{};  // of the sender, over an abstract Unix socket
  std::string subreaper{};
  std::string proc{};
  std::string temporary_files{};
  std::string single_copy{};  // process_vm_readv from another process of this user

  std::optional<int> ptrace_scope{};  // Yama's; unset: the kernel has no Yama
};

// Forks a process, so call it while this process has one thread.
KernelFacts probe_kernel();

}  // namespace paceline::doctor
