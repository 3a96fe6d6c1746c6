#pragma once

#include <cstddef>

namespace paceline::shm {

// A shared mapping of a file that forked children get as a private one: they read what is there,
// and what they write is theirs alone. Destroy it before the mapping ends.
class PrivateInChildren {
 public:
  PrivateInChildren(std::byte* data, std::size_t size, int file);
  PrivateInChildren(const PrivateInChildren&) = delete;
  PrivateInChildren& operator=(const PrivateInChildren&) = delete;
  ~PrivateInChildren();

 private:
  class Entry;

  Entry* entry_;
};

}  // namespace paceline::shm
