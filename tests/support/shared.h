#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <new>
#include <system_error>

namespace paceline::test {

// A T in memory that this process shares with its forked children.
template <typename T>
class Shared {
 public:
  Shared() {
    void* const memory =
        ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    object_ = new (memory) T;
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  ~Shared() { ::munmap(object_, sizeof(T)); }

  T& operator*() const { return *object_; }
  T* operator->() const { return object_; }

 private:
  T* object_;
};

}  // namespace paceline::test
