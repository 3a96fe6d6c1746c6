#pragma once

/// @file
/// Output of one rank, and random numbers of each.

#include <cstdint>
#include <cstdio>
#include <string_view>

#include <paceline/api.h>
#include <paceline/distributed.h>

namespace paceline {

/// Options of print.
struct PrintOptions {
  bool force = false;          ///< Whether ranks other than rank 0 print, too.
  std::FILE* output = stdout;  ///< Where to print. Not owned.
};

/// Writes `text` and a newline on rank 0; before a world is formed, on the rank that the launcher
/// says. Errors of writing are ignored. Also after silence_other_ranks. Safe to call from any
/// thread.
PACELINE_API void print(std::string_view text, const PrintOptions& options = {});

/// Discards from now on what ranks other than rank 0 write to standard output, by std::cout, printf
/// or any other way, so that a program that prints everywhere prints once. print with `force` is
/// still seen. Call it in a world, once output that others have buffered is flushed. Throws Error
/// if the system refuses.
PACELINE_API void silence_other_ranks();

/// Options of manual_seed.
struct ManualSeedOptions {
  /// Whether each rank has numbers of its own, as for dropout: its seed is `seed` + its rank.
  /// Otherwise all have the same.
  bool per_rank = false;
};

/// Seeds LibTorch's default generators, as torch::manual_seed. Returns the seed of this rank. Ranks
/// are as for print.
PACELINE_API std::uint64_t manual_seed(std::uint64_t seed, const ManualSeedOptions& options = {});

}  // namespace paceline
