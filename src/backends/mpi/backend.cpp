// c10d over MPI: the backend mpi.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <paceline/error.h>

#include "backends/hierarchical/remote_messages_backend.h"
#include "base/hash.h"
#include "base/launcher.h"
#include "base/parse.h"
#include "distributed/store_calls.h"
#include "distributed/store_exchange.h"
#include "mpi/engine.h"
#include "mpi/group.h"
#include "mpi/load.h"
#include "mpi/runtime.h"

namespace paceline::backends {
namespace {

using distributed::BackendRequest;

class MpiBackend final : public RemoteMessagesBackend {
 public:
  // `local`: of this rank alone.
  MpiBackend(const std::shared_ptr<mpi::Group>& group, std::shared_ptr<shm::Group> local,
             distributed::StoreBarrier monitored_barrier,
             std::shared_ptr<internode::RemoteMessages> messages, mpi::Runtime& runtime)
      : RemoteMessagesBackend(group, std::move(local), std::move(monitored_barrier),
                              std::move(messages)),
        runtime_(runtime) {}

  const std::string getBackendName() const override { return "mpi"; }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return remote_message(kSend, tensors, checked_peer(to), tag);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return remote_message(kReceive, tensors, checked_peer(from), tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return remote_message(kReceive, tensors, internode::RemoteMessages::Message::kAnyRank, tag);
  }

  // The other ranks learn it from the launcher.
  void abort_because(const std::string& text) noexcept override {
    runtime_.do_not_finalize();
    RemoteMessagesBackend::abort_because(text);
  }
  void check_peers(const std::vector<int>& /*needed*/, const shm::OpContext& op) override {
    region().check_usable(op);
  }
  std::unique_ptr<distributed::BucketReducer> make_bucket_reducer(
      const distributed::BucketReducer::Options& /*options*/) override {
    return nullptr;
  }
  bool reduces_in_place(bool /*several_leaves*/) const override { return false; }

 private:
  mpi::Runtime& runtime_;
};

// In the group's store.
class StoredArrivals final : public mpi::Group::Arrivals {
 public:
  StoredArrivals(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : store_(std::move(store)), rank_(rank), size_(size) {}

  void note(std::uint64_t call) override {
    try {
      distributed::call_store(base::Deadline::after(kAnswer), [store = store_, key = key_of(rank_),
                                                               call](const auto& /*cancelled*/) {
        // A call that the store answered late must not hide a later one.
        if (last_call(*store, key) < call) store->set(key, std::to_string(call));
        return true;
      });
    } catch (const std::exception&) {
      // The store has ended: reports name more ranks than are late.
    }
  }

  shm::RankSet missing(std::uint64_t call) override {
    try {
      const auto found =
          distributed::call_store(base::Deadline::after(kAnswer),
                                  [store = store_, size = size_, call](const auto& cancelled) {
                                    std::vector<int> ranks;
                                    for (int rank = 0; rank < size && !cancelled; ++rank) {
                                      if (last_call(*store, key_of(rank)) < call)
                                        ranks.push_back(rank);
                                    }
                                    return ranks;
                                  });
      shm::RankSet missing;
      for (const int rank : found.value_or(std::vector<int>())) missing.insert(rank);
      return missing;
    } catch (const std::exception&) {
      return {};
    }
  }

 private:
  static constexpr std::chrono::seconds kAnswer{1};
  static std::string key_of(int rank) { return fmt::format("waits {}", rank); }
  // In which the key's rank has waited for long; 0: none.
  static std::uint64_t last_call(c10d::Store& store, const std::string& key) {
    if (!store.check({key})) return 0;
    return base::parse_number(store.get_to_str(key), std::uint64_t{0},
                              std::numeric_limits<std::uint64_t>::max())
        .value_or(0);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int size_;
};

mpi::Runtime& runtime_for(const BackendRequest& request) {
  return mpi::Runtime::get(request.mpi ? std::optional(request.mpi->library) : std::nullopt);
}

// The Fortran handle of the program's communicator; none: MPI_COMM_WORLD.
std::optional<int> handle_of(const BackendRequest& request) {
  return request.mpi ? std::optional(request.mpi->fortran_handle) : std::nullopt;
}

// Where the ranks of the group are in the communicator. All ranks exchange it through the store,
// since MPI would wait for a missing rank for ever. If MPI cannot be used on one of them, all
// throw.
std::vector<int> exchange_ranks(const BackendRequest& request, bool needs_threads) {
  constexpr std::string_view kRank = "rank ";
  std::string own;
  std::exception_ptr error;
  try {
    mpi::Runtime& runtime = runtime_for(request);
    runtime.check_may_call_here();
    if (needs_threads && runtime.has_owner()) {
      throw UsageError(
          "as the engine between nodes, mpi calls MPI on threads of its own: initialise MPI with "
          "MPI_Init_thread and MPI_THREAD_MULTIPLE in place of MPI_Init, or leave it to the "
          "engine");
    }
    runtime.call([&](mpi::Library& library) {
      own = fmt::format("{}{}", kRank, library.rank_in(handle_of(request)));
      constexpr std::uint32_t kTags = internode::Engine::kTags;
      if (static_cast<std::uint32_t>(library.max_tag()) >= kTags - 1) return;
      throw UsageError(fmt::format("this MPI has tags up to {}, and the backend mpi needs {}",
                                   library.max_tag(), kTags - 1));
    });
  } catch (const std::exception& thrown) {
    error = std::current_exception();
    own = thrown.what();
  }
  distributed::StoreExchange exchange(request);
  const auto all = exchange.all_gather(own, base::Deadline::after(request.timeout));
  if (error) {
    exchange.let_others_read();
    std::rethrow_exception(error);
  }
  const shm::GlobalRanks global = request.global_ranks();
  std::vector<int> ranks;
  for (int rank = 0; rank < request.size; ++rank) {
    const std::string& text = all[static_cast<std::size_t>(rank)];
    if (!text.starts_with(kRank)) {
      exchange.let_others_read();
      throw UsageError(fmt::format("rank {} cannot use MPI: {}", global.of(rank), text));
    }
    const int found =
        base::parse_number(std::string_view(text).substr(kRank.size()), 0, INT_MAX).value_or(-1);
    const auto same = std::ranges::find(ranks, found);
    if (same != ranks.end()) {
      exchange.let_others_read();
      throw UsageError(fmt::format(
          "ranks {} and {} are both rank {} of {}: the backend mpi needs all ranks to be started "
          "by one mpirun",
          global.of(static_cast<int>(same - ranks.begin())), global.of(rank), found,
          request.mpi ? "the communicator" : "MPI_COMM_WORLD"));
    }
    ranks.push_back(found);
  }
  return ranks;
}

// Communicators of the group's ranks, which nobody else uses.
struct Connection {
  mpi::Runtime& runtime;
  std::vector<std::unique_ptr<mpi::Communicator>> communicators;
};

Connection connect(const BackendRequest& request, int count, bool needs_threads = false) {
  const std::vector<int> ranks = exchange_ranks(request, needs_threads);
  Connection made{runtime_for(request), {}};
  constexpr int kTags = 1 << 15;  // that every MPI has
  const auto tag = static_cast<int>(base::hash(request.group_name) % kTags);
  made.runtime.call_and_wait([&](mpi::Library& library) {
    made.communicators.push_back(library.form(handle_of(request), ranks, tag));
    while (--count > 0) made.communicators.push_back(made.communicators[0]->duplicate());
  });
  return made;
}

c10::intrusive_ptr<c10d::Backend> make_mpi(const BackendRequest& request) {
  distributed::own_options<std::monostate>(request, "mpi");
  auto [runtime, communicators] = connect(request, 3);
  const shm::GlobalRanks global = request.global_ranks();
  auto region = shm::Region::create({}, 0, 1,
                                    {.name = request.group_name,
                                     .global_ranks = shm::GlobalRanks({global.of(request.rank)}),
                                     .timeout = request.timeout});
  auto local = std::make_shared<shm::Group>(region);
  auto group = std::make_shared<mpi::Group>(
      region, global, runtime, std::move(communicators[0]),
      std::make_unique<StoredArrivals>(request.store, request.rank, request.size));
  auto messages = std::make_shared<internode::RemoteMessages>(
      region, global, request.rank,
      std::make_unique<mpi::Engine>(runtime, std::move(communicators[1]),
                                    std::move(communicators[2])));
  return c10::make_intrusive<MpiBackend>(
      group, std::move(local), distributed::StoreBarrier(request), std::move(messages), runtime);
}

std::unique_ptr<internode::Engine> make_mpi_engine(const BackendRequest& request) {
  auto [runtime, communicators] = connect(request, 2, true);
  return std::make_unique<mpi::Engine>(runtime, std::move(communicators[0]),
                                       std::move(communicators[1]));
}

const bool mpi_registered =
    !mpi::available().empty() &&
    distributed::register_backend("mpi", {.make = &make_mpi,
                                          .type = c10d::ProcessGroup::BackendType::MPI,
                                          .make_engine = &make_mpi_engine});

}  // namespace
}  // namespace paceline::backends
