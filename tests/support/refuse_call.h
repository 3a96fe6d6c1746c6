#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>

namespace paceline::test {

// As sandboxes do: the system call fails with EPERM from now on, in the calling thread and what it
// starts. False if there are no seccomp filters here.
inline bool refuse_call(unsigned number) {
  std::array<sock_filter, 4> program{
      {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
       BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
       BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
       BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)}};
  const sock_fprog filter{program.size(), program.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0 &&
         ::syscall(number, 0, 0, 0, 0, 0, 0) < 0 && errno == EPERM;
}

// Whether this process may read the memory of itself or of a forked child: Yama or a sandbox may
// forbid it.
inline bool may_read_process(pid_t process) {
  char from = 0;
  char to = 0;
  const iovec local{&to, 1};
  const iovec remote{&from, 1};
  return ::process_vm_readv(process, &local, 1, &remote, 1, 0) == 1;
}

}  // namespace paceline::test
