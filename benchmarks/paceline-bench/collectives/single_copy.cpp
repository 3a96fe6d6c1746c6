#include "collectives/single_copy.h"

#include <ATen/ATen.h>
#include <sys/uio.h>
#include <unistd.h>

#include <paceline/collectives.h>
#include <paceline/distributed.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "base/errno_error.h"
#include "measure/gather_records.h"

namespace paceline::bench {
namespace {

// A rank's process and the address of its data there.
struct Source {
  pid_t process;
  std::byte* data;
};

// What this rank receives from another, or from itself.
struct Piece {
  int from;
  std::size_t begin;   // in the source
  std::size_t target;  // in the target
  std::size_t bytes;
};

std::vector<Piece> pieces_of(const std::string& collective, std::size_t whole) {
  const auto rank = static_cast<std::size_t>(get_rank());
  const auto ranks = static_cast<std::size_t>(get_world_size());
  const std::size_t part = whole / ranks;
  std::vector<Piece> pieces;
  if (collective == "send_recv") {
    pieces.push_back({static_cast<int>((rank + ranks - 1) % ranks), 0, 0, whole});
  } else if (collective == "scatter") {
    pieces.push_back({0, rank * part, 0, part});
  } else if (collective == "all_to_all" || (collective == "gather" && rank == 0)) {
    // From the next rank first: a process that several read at a time is slow to read.
    for (std::size_t i = 0; i < ranks; ++i) {
      const std::size_t from = (rank + i) % ranks;
      const std::size_t begin = collective == "gather" ? 0 : rank * part;
      pieces.push_back({static_cast<int>(from), begin, from * part, part});
    }
  }
  return pieces;
}

void read(const Source& source, const Piece& piece, std::byte* target) {
  for (std::size_t done = 0; done < piece.bytes;) {
    const iovec local{target + piece.target + done, piece.bytes - done};
    const iovec remote{source.data + piece.begin + done, piece.bytes - done};
    const ssize_t copied = ::process_vm_readv(source.process, &local, 1, &remote, 1, 0);
    if (copied <= 0) throw base::errno_error("cannot read another rank's memory");
    done += static_cast<std::size_t>(copied);
  }
}

bool can_read_all(const std::vector<Source>& sources) {
  bool all = true;
  for (const Source& source : sources) {
    std::byte byte{};
    const iovec local{&byte, 1};
    const iovec remote{source.data, 1};
    all = all && ::process_vm_readv(source.process, &local, 1, &remote, 1, 0) == 1;
  }
  const at::Tensor agreed = at::full({1}, all ? 1 : 0);
  all_reduce(agreed, {.op = ReduceOp::MIN});
  return agreed.item<int>() == 1;
}

}  // namespace

std::optional<Contender> single_copy(const std::string& collective, std::int64_t bytes) {
  constexpr const char* kMoving[] = {"gather", "scatter", "all_to_all", "send_recv"};
  if (std::ranges::find(kMoving, collective) == std::end(kMoving)) return std::nullopt;
  const auto size = static_cast<std::size_t>(bytes);
  const auto own = std::make_shared<std::vector<std::byte>>(size);
  const auto target = std::make_shared<std::vector<std::byte>>(size);
  const Source mine{::getpid(), own->data()};
  const std::vector<Source> sources = gather_record(mine);
  if (!can_read_all(sources)) return std::nullopt;
  return Contender{
      .implementation = "single_copy",
      .variant = "",
      .prepare =
          [own, target] {
            std::ranges::fill(*own, std::byte{1});
            std::ranges::fill(*target, std::byte{2});
          },
      .run =
          [own, target, sources, pieces = pieces_of(collective, size)] {
            barrier();
            for (const Piece& piece : pieces) {
              if (piece.from == get_rank()) {
                std::memcpy(target->data() + piece.target, own->data() + piece.begin, piece.bytes);
              } else {
                read(sources[static_cast<std::size_t>(piece.from)], piece, target->data());
              }
            }
            barrier();
          }};
}

}  // namespace paceline::bench
