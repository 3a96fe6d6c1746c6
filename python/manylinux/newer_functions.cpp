// Functions newer than glibc 2.28 and GCC 8 that Paceline calls, for a wheel that loads with these.
// If the machine's glibc has a function that needs more than a system call, it is used.
// old_libraries compiles this file into a static library.

#include <cxxabi.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>
#include <exception>

namespace {

// The function of the machine's glibc, or null. Ours are hidden, so they are not found.
template <class Function>
Function* find(Function*, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

}  // namespace

extern "C" {

// glibc 2.32: while it is not 0, libstdc++ counts references without atomic instructions.
char __libc_single_threaded = 0;

// 2.30
pid_t gettid() noexcept {
  return static_cast<pid_t>(::syscall(SYS_gettid));
}

// 2.33, as is the next one: inline functions before.
int fstat(int fd, struct stat* status) noexcept {
  return static_cast<int>(::syscall(SYS_fstat, fd, status));
}

int lstat(const char* path, struct stat* status) noexcept {
  return static_cast<int>(::syscall(SYS_lstat, path, status));
}

// 2.34
int close_range(unsigned first, unsigned last, int flags) noexcept {
  return static_cast<int>(::syscall(SYS_close_range, first, last, flags));
}

// 2.32, as are the next two. The callers print the number if there is no name.
const char* strerrorname_np(int code) noexcept {
  const auto real = find(&strerrorname_np, "strerrorname_np");
  return real != nullptr ? real(code) : nullptr;
}

const char* strerrordesc_np(int code) noexcept {
  if (const auto real = find(&strerrordesc_np, "strerrordesc_np")) return real(code);
  static thread_local char text[64];
  return ::strerror_r(code, text, sizeof text);
}

const char* sigabbrev_np(int signal) noexcept {
  const auto real = find(&sigabbrev_np, "sigabbrev_np");
  return real != nullptr ? real(signal) : nullptr;
}

// 2.30. Without it, a change of the system's clock ends the wait early or late, as it does in every
// program that was compiled with an older glibc.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* deadline) {
  if (const auto real = find(&pthread_cond_clockwait, "pthread_cond_clockwait"))
    return real(condition, mutex, clock, deadline);
  timespec now;
  timespec until;
  if (::clock_gettime(clock, &now) != 0 || ::clock_gettime(CLOCK_REALTIME, &until) != 0)
    return errno;
  constexpr long kSecond = 1'000'000'000;
  const long nanoseconds = until.tv_nsec + deadline->tv_nsec - now.tv_nsec;
  const long carry = nanoseconds < 0 ? -1 : nanoseconds / kSecond;
  until.tv_sec += deadline->tv_sec - now.tv_sec + carry;
  until.tv_nsec = nanoseconds - carry * kSecond;
  return ::pthread_cond_timedwait(condition, mutex, &until);
}

// 2.38: newer headers call strtol and its like by these names, since C23 gave them a prefix, 0b.
#define PACELINE_C23(type, name)                                                   \
  type old_##name(const char* text, char** end, int base) noexcept __asm__(#name); \
  type __isoc23_##name(const char* text, char** end, int base) noexcept {          \
    return old_##name(text, end, base);                                            \
  }
PACELINE_C23(long, strtol)
PACELINE_C23(long long, strtoll)
PACELINE_C23(unsigned long, strtoul)
PACELINE_C23(unsigned long long, strtoull)

// GCC 13: what ends a noexcept function that throws. libstdc++.a's would bring its own copy of the
// terminate handler.
[[noreturn]] void __cxa_call_terminate(void* exception) noexcept {
  if (exception != nullptr) abi::__cxa_begin_catch(exception);
  std::terminate();
}

}  // extern "C"
