#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

#include "base/deadline.h"
#include "distributed/rendezvous/plan.h"

namespace paceline::distributed {

// The store in the plan's file, which errors call `what`. Throws what FileStore would retry or wait
// for: Error if the file cannot be opened, UsageError if it is no store, Timeout if another process
// keeps it locked.
c10::intrusive_ptr<c10d::Store> open_file_store(const Plan& plan, const std::string& what,
                                                const base::Deadline& deadline);

// A file outlives killed ranks, and then still contains their counters. Throws UsageError if a
// process claimed the plan's rank in `store` before.
void claim_rank(c10d::Store& store, const Plan& plan);

}  // namespace paceline::distributed
