#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

#include "distributed/rendezvous/plan.h"

namespace paceline::distributed {

// The store at the plan's address; its server too if the plan says so. A process has one server at
// an address, for as long as it lives.
c10::intrusive_ptr<c10d::Store> open_tcp_store(const Plan& plan, std::chrono::milliseconds timeout);

}  // namespace paceline::distributed
