#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline::shm {

// The collective operations of a Group and their properties. A new one needs an enumerator and a
// row here, which provides agreement, descriptions, checks of arguments and staging.

enum class Operation : std::uint8_t {
  none,
  barrier,
  broadcast,
  reduce,
  all_reduce,
  gather,
  scatter,
  all_gather,
  reduce_scatter,
  all_to_all
};

enum class RootRole : std::uint8_t { none, source, destination };

// The size of all ranks' tensors together, in units of what one rank receives.
struct TotalSize {
  std::size_t per_rank = 2;  // times the number of ranks
  std::size_t once = 0;
};

struct OperationTraits {
  const char* name;
  bool has_data = true;  // elements of a type
  RootRole root = RootRole::none;
  bool reduces = false;     // with a ReduceOp
  bool common_part = true;  // a sender has one part for all ranks, else one for each
  // Whether large unregistered parts are best read from the memory of their rank's process.
  bool single_copy = false;
  TotalSize total_size{};
};

// A switch without a default, so that the compiler warns if a new enumerator has no row.
constexpr OperationTraits traits(Operation operation) {
  switch (operation) {
    case Operation::none:
      return {.name = "no operation", .has_data = false};
    case Operation::barrier:
      return {.name = "barrier", .has_data = false};
    case Operation::broadcast:
      // The root's tensor, and a copy for each other rank.
      return {
          .name = "broadcast", .root = RootRole::source, .total_size = {.per_rank = 1, .once = 0}};
    case Operation::reduce:
      return {.name = "reduce", .root = RootRole::destination, .reduces = true};
    case Operation::all_reduce:
      return {.name = "all_reduce", .reduces = true};
    case Operation::gather:
      return {.name = "gather",
              .root = RootRole::destination,
              .total_size = {.per_rank = 0, .once = 2}};
    case Operation::scatter:
      return {
          .name = "scatter", .root = RootRole::source, .common_part = false, .single_copy = true};
    case Operation::all_gather:
      return {.name = "all_gather", .total_size = {.per_rank = 1, .once = 1}};
    case Operation::reduce_scatter:
      return {.name = "reduce_scatter", .reduces = true, .common_part = false};
    case Operation::all_to_all:
      return {.name = "all_to_all", .common_part = false, .single_copy = true};
  }
  return {.name = "an unknown operation"};  // from a damaged peer
}

// "all_reduce".
constexpr const char* name(Operation operation) {
  return traits(operation).name;
}

}  // namespace paceline::shm
