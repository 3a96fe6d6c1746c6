#pragma once

#include <functional>
#include <string>
#include <vector>

#include <paceline/distributed.h>

#include "support/process_ranks.h"

namespace paceline::test {

// The backends every test over several ranks runs on.
std::vector<std::string> backends();

// What a body needs to join the world of its ranks.
struct RankContext {
  int rank;
  int size;
  InitOptions init;  // for init_process_group
};

// Runs `body` as `size` processes with one thread each, which meet in a store in memory.
std::vector<RankEnd> run_torch_ranks(int size, const std::string& backend,
                                     const std::function<std::string(const RankContext&)>& body);

// For bodies that return nothing: a world is made around `body`, and every rank must exit cleanly.
void expect_torch_ranks(int size, const std::string& backend,
                        const std::function<void(int rank, int size)>& body);

}  // namespace paceline::test
