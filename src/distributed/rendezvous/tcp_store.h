#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

#include "base/address.h"
#include "distributed/rendezvous/plan.h"

namespace paceline::distributed {

// The store at the plan's address; its server too if the plan says so. A process has one server at
// an address, which it keeps for later worlds there until it has served at two others.
c10::intrusive_ptr<c10d::Store> open_tcp_store(const Plan& plan, std::chrono::milliseconds timeout);

// Serves a store at a free port of an address of this machine, the same one each time, and returns
// the port. open_tcp_store then finds it.
int serve_at_free_port(const base::Address& address, std::chrono::milliseconds timeout);

}  // namespace paceline::distributed
