#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <string>

#include "base/deadline.h"
#include "distributed/rendezvous/plan.h"

namespace paceline::distributed {

// A store in memory for processes that another launcher started on this machine. They find rank 0
// by an abstract socket whose name comes from the plan's job and from `prefix`, and get the memory
// from it; so there is no port, and the name is free again once all have come. Processes of other
// users are not let in. Throws Timeout naming the ranks that did not come.
c10::intrusive_ptr<c10d::Store> open_local_store(const Plan& plan, const std::string& prefix,
                                                 const base::Deadline& deadline);

// For messages.
std::string local_place(const Plan& plan);

}  // namespace paceline::distributed
