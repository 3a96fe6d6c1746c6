#include "checks/checks.h"

namespace paceline::doctor {
namespace {

std::string why_absent(const std::string& backend) {
  if (backend == "gloo") {
    return "not in this build: install libgloo-dev and build Paceline again";
  }
  if (backend == "mpi") {
    return "not in this build: install libmpich-dev or libopenmpi-dev and build Paceline again";
  }
  return "not in this build of Paceline";
}

std::string purpose(const std::string& backend) {
  if (backend == "paceline") return "shared memory, between ranks of this machine";
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
                            .text = one.available ? purpose(one.name) : why_absent(one.name),
                            .values = {{"available", one.available}}});
  }
  return group;
}

}  // namespace paceline::doctor
