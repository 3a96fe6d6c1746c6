#include "facts/libtorch.h"

#include <ATen/Version.h>
#include <torch/version.h>

#include <string>

#include <paceline/distributed.h>

#include "distributed/backend.h"
#include "distributed/rendezvous/plan.h"

namespace paceline::doctor {
namespace {

// LibTorch has no function for its version, but names it among the settings of its build. Empty if
// it does not.
std::string running_version() {
  const std::string settings = at::show_config();
  const std::string name = "TORCH_VERSION=";
  const std::size_t at = settings.find(name);
  if (at == std::string::npos) return "";
  const std::size_t begin = at + name.size();
  return settings.substr(begin, settings.find_first_of(", \n", begin) - begin);
}

}  // namespace

VersionFacts read_versions() {
  VersionFacts facts = read_system_versions();
  facts.libtorch = running_version();
  facts.libtorch_compiled = TORCH_VERSION;
  facts.library = path_of_loaded("libtorch_cpu.so");
  facts.found_by = found_by(facts.library, read_loader_paths());
  return facts;
}

std::vector<BackendFacts> read_backends() {
  std::vector<BackendFacts> found;
  for (const char* const name : {"paceline", "gloo", "mpi"}) {
    found.push_back({name, distributed::is_backend_available(name)});
  }
  std::string why_not;
  const bool has_nccl = is_nccl_available(&why_not);
  found.push_back({"nccl", has_nccl, why_not});
  return found;
}

void check_rendezvous(const base::Environment& environment) {
  distributed::plan_rendezvous({}, environment, true);
}

}  // namespace paceline::doctor
