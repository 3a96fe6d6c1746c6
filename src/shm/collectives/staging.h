#pragma once

#include <algorithm>
#include <cstddef>

#include "shm/collectives/group.h"
#include "shm/memory/copy.h"

namespace paceline::shm {

// Up to this many bytes a further copy costs less than a further round, in which ranks that share a
// core have to wait for it.
inline constexpr std::size_t kSmallBytes = std::size_t{32} << 10;

// This rank's parts on their way through its staging buffer, chunk by chunk. If the operation has a
// common part there is one for all ranks (or none), and a chunk is as large as the buffer; else
// there is one for each rank (or none), and the buffer has a section for each.
class Group::Staging {
 public:
  Staging(Group& group, std::span<const Input> parts);

  // The most bytes for another rank.
  std::size_t largest() const { return largest_; }
  // Whether reading in place, where that is possible, costs less.
  bool is_large() const { return largest_ > std::min(kSmallBytes, section_); }
  // How many chunks a part of `bytes` takes.
  std::size_t chunks(std::size_t bytes) const { return (bytes + section_ - 1) / section_; }
  std::size_t begin_of(std::size_t chunk) const { return chunk * section_; }
  std::size_t size_of(std::size_t chunk, std::size_t bytes) const {
    return bytes > begin_of(chunk) ? std::min(bytes - begin_of(chunk), section_) : 0;
  }

  // Writes a chunk of every part, for the coming round.
  void put(std::size_t chunk) const;
  // The chunk from rank `from` in the last round.
  std::byte* get(int from) const {
    return group_.staging_of(from) +
           (common_ ? 0 : static_cast<std::size_t>(group_.rank()) * section_);
  }

 private:
  Group& group_;
  std::span<const Input> parts_;
  bool common_;
  std::size_t section_;
  std::size_t largest_ = 0;
};

}  // namespace paceline::shm
