// paceline._C: makes the backend `paceline` for torch.distributed, and what
// paceline.DistributedDataParallel stands on.

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <paceline/tune_malloc.h>
#include <paceline/version.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#ifdef PACELINE_SEVERAL_NODES
#include "backends/hierarchical/backend.h"
#endif
#include "backends/paceline/backend.h"
#include "backends/paceline/reconfigurable_backend.h"
#include "base/address.h"
#include "base/environment.h"
#include "ddp.h"
#include "distributed/debug/handlers.h"
#include "distributed/find_topology.h"
#include "distributed/make_group.h"
#include "distributed/rendezvous/agent_round.h"
#include "errors.h"
#include "logging.h"

namespace py = pybind11;

namespace paceline::python {
namespace {

// Where the ranks of the default group run, for the groups of some of them.
struct WorldLayout {
  distributed::Topology topology;
  std::string host;  // see BackendRequest; empty on one node
};

// Set on the default group's backend only.
struct HasLayout {
  std::shared_ptr<const WorldLayout> layout;
};

c10::intrusive_ptr<c10d::Backend> make_backend(distributed::BackendRequest request,
                                               std::shared_ptr<const WorldLayout> layout);

template <typename Base>
class PythonBackend final : public Base, public HasLayout {
 public:
  using Base::Base;
  // The destructor joins threads that may run a future's callback, which needs the GIL.
  ~PythonBackend() override {
    if (PyGILState_Check() == 0) return;
    const py::gil_scoped_release release;
    this->leave();
  }

 protected:
  c10::intrusive_ptr<c10d::Backend> make_part(distributed::BackendRequest part) const override {
    return make_backend(std::move(part), nullptr);
  }
};

c10::intrusive_ptr<c10d::Backend> make_backend(distributed::BackendRequest request,
                                               std::shared_ptr<const WorldLayout> layout) {
#ifdef PACELINE_SEVERAL_NODES
  if (request.spans_nodes()) {
    auto backend = c10::make_intrusive<PythonBackend<backends::HierarchicalBackend>>(
        backends::connect_nodes(std::move(request)));
    backend->layout = std::move(layout);
    return backend;
  }
#endif
  auto backend = c10::make_intrusive<PythonBackend<backends::PacelineBackend>>(
      backends::form_region(std::move(request)));
  backend->layout = std::move(layout);
  return backend;
}

std::string host_of(const c10::intrusive_ptr<c10d::Store>& store) {
  auto under = store;
  if (const auto prefixed = c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(store)) {
    under = prefixed->getUnderlyingNonPrefixStore();
  }
  const auto tcp = c10::dynamic_intrusive_pointer_cast<c10d::TCPStore>(under);
  return tcp ? base::host_towards(tcp->getHost(), tcp->getPort()) : "";
}

// The launcher's variables are about the ranks of a world that it started.
distributed::Placement own_placement(const distributed::BackendRequest& request) {
  if (!request.members.empty()) return distributed::Placement::own({}, false);
  try {
    const auto& environment = base::environment();
    const bool launched =
        environment.rank == request.rank && environment.world_size == request.size;
    return distributed::Placement::own(environment, launched);
  } catch (const UsageError&) {  // the program may not use them
    return distributed::Placement::own({}, false);
  }
}

// Whether processes that have ended may have left keys in the store, as before a restart by
// torchrun.
bool has_agent_store() {
  try {
    return base::environment().use_agent_store;
  } catch (const UsageError&) {  // the program may not use the variables
    return false;
  }
}

// Each machine is a node if the variables contradict each other: a program that starts processes of
// its own may leave them so.
distributed::Topology topology_of(std::vector<distributed::Placement> placements) {
  try {
    return distributed::Topology(placements);
  } catch (const UsageError&) {
    for (auto& one : placements) one.variables.reset();
    return distributed::Topology(placements);
  }
}

distributed::Topology find_topology(const distributed::BackendRequest& request) {
  if (request.size == 1) return distributed::Topology::one_node(1);
  return distributed::exchange_placements(
      request, "paceline", own_placement(request), [&](auto placements) {
        auto topology = topology_of(std::move(placements));
        distributed::check_reach("paceline", request.group_name, topology,
                                 distributed::every_rank(request.size));
        return topology;
      });
}

// For new_group, `world_ranks` are the group's ranks in the default group, and `world` is that
// group's backend for the CPU; else both are empty.
c10::intrusive_ptr<c10d::Backend> create(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                         std::chrono::milliseconds timeout, std::string group_name,
                                         std::vector<int> world_ranks,
                                         const backends::PacelineOptions& options,
                                         bool reconfigurable,
                                         const c10::intrusive_ptr<c10d::Backend>& world) {
  distributed::BackendRequest request{.store = std::move(store),
                                      .rank = rank,
                                      .size = size,
                                      .timeout = timeout,
                                      .group_name = std::move(group_name),
                                      .options = options.for_request(),
                                      .members = std::move(world_ranks)};
  if (reconfigurable) {
    return c10::make_intrusive<backends::ReconfigurableBackend>(
        request, [](std::shared_ptr<shm::Region> region) {
          return c10::make_intrusive<PythonBackend<backends::PacelineBackend>>(std::move(region));
        });
  }
  if (dynamic_cast<distributed::ExtendedBackend*>(world.get()) != nullptr) {
    const c10::weak_intrusive_ptr<c10d::Backend> weak(world);
    request.check_peers = [weak, ranks = request.members] {
      const auto whole = weak.lock();
      auto* const ours = dynamic_cast<distributed::ExtendedBackend*>(whole.get());
      if (ours != nullptr) ours->check_peers(ranks, {"new_group", 0});
    };
  }
  std::optional<distributed::AgentRound> round;  // until all ranks have met
  if (size > 1 && has_agent_store()) request.store = round.emplace(request).group_store();
  const auto* const known = dynamic_cast<const HasLayout*>(world.get());
  if (known != nullptr && known->layout) {
    request.nodes = distributed::nodes_of(known->layout->topology, request.members);
    request.host = known->layout->host;
    return make_backend(std::move(request), nullptr);
  }
  const auto group_store = request.store;
  request.store = c10::make_intrusive<c10d::PrefixStore>("topology", group_store);
  auto topology = find_topology(request);
  request.store = group_store;
  request.nodes = distributed::nodes_of(topology, distributed::every_rank(size));
  if (!request.nodes.empty()) request.host = host_of(request.store);
  std::shared_ptr<const WorldLayout> layout;
  if (request.members.empty()) {
    layout = std::make_shared<const WorldLayout>(WorldLayout{std::move(topology), request.host});
  }
  return make_backend(std::move(request), std::move(layout));
}

}  // namespace
}  // namespace paceline::python

PYBIND11_MODULE(_C, module) {
  module.doc() = "The compiled part of the package paceline.";
  module.attr("__version__") = paceline::kVersion;
  py::module_::import(
      "torch._C._distributed_c10d");  // registers the types of arguments and results
  py::register_exception_translator([](std::exception_ptr thrown) {
    if (thrown) paceline::python::set_python_error(std::move(thrown));
  });
  module.def(
      "create", &paceline::python::create, py::arg("store"), py::arg("rank"), py::arg("size"),
      py::arg("timeout"), py::arg("group_name"), py::arg("world_ranks"), py::arg("options"),
      py::arg("reconfigurable"), py::arg("world"), py::call_guard<py::gil_scoped_release>(),
      "Makes the backend of one group. Every rank of the group calls it; torch.distributed "
      "does so. `world`: of the groups of new_group, the default group's backend for the CPU.");
  module.def("tune_malloc", &paceline::tune_malloc, "What paceline.tune_malloc() calls.");
  using paceline::backends::PacelineOptions;
  py::class_<PacelineOptions, c10::intrusive_ptr<PacelineOptions>, c10d::Backend::Options>(
      module, "Options",
      "Options of a group: the argument pg_options of init_process_group and new_group.")
      .def(py::init<>())
      .def_readwrite("staging_bytes", &PacelineOptions::staging_bytes,
                     "The size in bytes of the staging buffers of all ranks of the group together.")
      .def_readwrite(
          "single_copy_bytes", &PacelineOptions::single_copy_bytes,
          "In a scatter or an all_to_all, a rank with a part of this many bytes or more has its "
          "parts read from the memory of its process, if the system allows it. None: 4 "
          "MiB if the group has at least 3 ranks and a core for each, else never.");
  paceline::python::bind_ddp(module);
  paceline::python::log_to_python();
  paceline::distributed::register_debug_handlers();
}
