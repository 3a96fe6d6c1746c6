#include "checks/checks.h"

namespace paceline::doctor {
namespace {

std::string why_absent(const BackendFacts& backend) {
  if (!backend.why_not.empty()) return backend.why_not;
  if (backend.name == "gloo") {
    return "not in this build: install libgloo-dev and build Paceline again";
  }
  if (backend.name == "mpi") {
    return "not in this build: install libmpich-dev or libopenmpi-dev and build Paceline again";
  }
  return "not in this build of Paceline";
}

std::string purpose(const std::string& backend) {
  if (backend == "paceline") return "shared memory on a machine, Gloo or MPI between machines";
  if (backend == "gloo") return "TCP, also between machines";
  if (backend == "mpi") return "for ranks that mpirun has started";
  return "available";
}

}  // namespace

Group check_backends(const std::vector<BackendFacts>& facts) {
  Group group{"backends", {}};
  for (const BackendFacts& one : facts) {
    group.checks.push_back({.name = one.name,
                            .status = one.available ? Status::ok : Status::note,
                            .text = one.available ? purpose(one.name) : why_absent(one),
                            .values = {{"available", one.available}}});
  }
  return group;
}

}  // namespace paceline::doctor
