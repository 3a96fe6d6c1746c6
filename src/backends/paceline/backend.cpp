#include "backends/paceline/backend.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <paceline/error.h>

#include <algorithm>
#include <new>
#include <set>

#include "backends/paceline/reconfigurable_backend.h"
#include "backends/paceline/shm_bucket_reducer.h"
#include "backends/paceline/state.h"
#include "distributed/hook_scope.h"
#include "distributed/make_group.h"
#include "distributed/store_exchange.h"

namespace paceline::backends {
namespace {

const bool paceline_registered = distributed::register_backend(
    "paceline",
    {.make = [](distributed::BackendRequest request) -> c10::intrusive_ptr<c10d::Backend> {
       if (request.enable_reconfigure) {
         return c10::make_intrusive<ReconfigurableBackend>(request, [](auto region) {
           return c10::make_intrusive<PacelineBackend>(std::move(region));
         });
       }
       return c10::make_intrusive<PacelineBackend>(form_region(std::move(request)));
     },
     .type = c10d::ProcessGroup::BackendType::CUSTOM,
     .one_node = true,
     .reconfigures = true,
     .max_ranks = shm::kMaxRanks,
     .across_nodes = "hierarchical"});

}  // namespace

void PacelineOptions::set(const shm::RegionOptions& options) {
  group_name = options.name;
  staging_bytes = options.staging_bytes;
  single_copy_bytes = options.single_copy_bytes;
}

paceline::PacelineOptions PacelineOptions::for_request() const {
  return {.staging_bytes = staging_bytes, .single_copy_bytes = single_copy_bytes};
}

shm::RegionOptions region_options(const distributed::BackendRequest& request) {
  shm::RegionOptions options{.name = request.group_name,
                             .global_ranks = request.global_ranks(),
                             .timeout = request.timeout};
  const auto own = distributed::own_options<paceline::PacelineOptions>(request, "paceline");
  if (own.engine != "gloo" && own.engine != "mpi") {
    throw UsageError(fmt::format(
        "PacelineOptions::engine '{}' is neither gloo nor mpi, which carry data between nodes",
        own.engine));
  }
  options.staging_bytes = own.staging_bytes.value_or(options.staging_bytes);
  options.single_copy_bytes = own.single_copy_bytes;
  return options;
}

std::shared_ptr<shm::Region> form_region(distributed::BackendRequest request) {
  const shm::RegionOptions options = region_options(request);
  if (!request.sockets.empty() || request.size == 1) {
    return shm::Region::create(std::move(request.sockets), request.rank, request.size, options);
  }
  distributed::StoreExchange exchange(request);
  return shm::Region::create(exchange, options);
}

PacelineBackend::PacelineBackend(std::shared_ptr<shm::Collectives> group,
                                 std::shared_ptr<shm::Group> local, const shm::GlobalRanks& ranks)
    : ExtendedBackend(group->rank(), group->size()),
      group_(std::move(group)),
      local_group_(std::move(local)),
      region_(local_group_->region()),
      mailbox_(std::make_shared<shm::Mailbox>(region_)),
      monitored_barrier_(region_),
      options_(c10::make_intrusive<PacelineOptions>(region_->options().timeout)),
      timeout_(region_->options().timeout),
      progress_(std::make_unique<ProgressThreads>()),
      p2p_progress_(std::make_unique<P2PProgressThread>(mailbox_)),
      source_("groups", [this] { return describe_group(*region_, *mailbox_); }) {
  options_->set(region_->options());
  for (int rank = 0; rank < getSize(); ++rank) {
    options_->global_ranks_in_group.push_back(static_cast<std::uint64_t>(ranks.of(rank)));
  }
}

PacelineBackend::~PacelineBackend() {
  leave();
  const bool forked = region_->in_forked_child();
  if (forked || progress_->detached()) static_cast<void>(progress_.release());
  if (forked || p2p_progress_->detached()) static_cast<void>(p2p_progress_.release());
  if (forked || callbacks_->detached()) {
    static_cast<void>(new (std::nothrow) std::shared_ptr<ProgressThreads>(callbacks_));
  }
}

void PacelineBackend::setTimeout(std::chrono::milliseconds timeout) {
  timeout = distributed::checked_timeout(timeout);
  timeout_ = timeout;
  options_->timeout = timeout;
}

std::chrono::milliseconds PacelineBackend::effective_timeout(
    std::chrono::milliseconds timeout) const {
  return timeout > std::chrono::milliseconds(0) ? timeout : timeout_.load();
}

int PacelineBackend::checked_root(const Kind& kind, std::int64_t root) const {
  shm::check_root(kind.name, root, getSize());
  return static_cast<int>(root);
}

PacelineBackend::WorkPtr PacelineBackend::coalesced(WorkPtr work) {
  std::lock_guard lock(coalescing_mutex_);
  const auto own = coalescing_.find(std::this_thread::get_id());
  if (own == coalescing_.end()) return work;
  own->second.push_back(work);
  return work;
}

void PacelineBackend::startCoalescing() {
  std::lock_guard lock(coalescing_mutex_);
  coalescing_[std::this_thread::get_id()].clear();
}

PacelineBackend::WorkPtr PacelineBackend::endCoalescing() {
  std::lock_guard lock(coalescing_mutex_);
  auto own = coalescing_.extract(std::this_thread::get_id());
  if (own.empty()) throw UsageError("endCoalescing without startCoalescing");
  return c10::make_intrusive<CoalescedWork>(std::move(own.mapped()));
}

void PacelineBackend::shutdown() {
  distributed::HookScope::check_not_active("shutdown");
  leave();
}

void PacelineBackend::leave() {
  if (region_->in_forked_child()) return;
  progress_->stop();
  p2p_progress_->stop();
  mailbox_->close();
  callbacks_->stop();
  region_->depart();
}

// Comes before any use of our threads, which a forked child lacks.
void PacelineBackend::check_usable(const char* operation) const {
  region_->check_usable({operation, sequence_ + 1});
  if (!progress_->stopped()) return;
  throw UsageError(
      fmt::format("{} on group {}, which this rank has left", operation, region_->options().name));
}

c10d::ErrorType PacelineBackend::getError() {
  switch (region_->failure().kind) {
    case shm::FailureKind::none:
      return c10d::ErrorType::SUCCESS;
    case shm::FailureKind::timeout:
      return c10d::ErrorType::TIMEOUT;
    case shm::FailureKind::peer_lost:
      return c10d::ErrorType::REMOTE_ERROR;
    case shm::FailureKind::mismatch:
      break;
  }
  return c10d::ErrorType::COMM_ERROR;
}

void PacelineBackend::abort_because(const std::string& text) noexcept {
  region_->abort(text);
}

c10::intrusive_ptr<c10d::Backend> PacelineBackend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& options) {
  if (std::set<int>(ranks.begin(), ranks.end()).size() != ranks.size() ||
      std::ranges::any_of(ranks, [&](int rank) { return rank < 0 || rank >= getSize(); })) {
    throw UsageError(fmt::format("split({}): ranks must be different and from 0 to {}",
                                 fmt::join(ranks, ", "), getSize() - 1));
  }
  const auto own = std::find(ranks.begin(), ranks.end(), getRank());
  if (own == ranks.end()) return {};
  distributed::BackendRequest request{
      .store = store,
      .rank = static_cast<int>(own - ranks.begin()),
      .size = static_cast<int>(ranks.size()),
      .timeout = timeout_.load(),
      .group_name = fmt::format("split of {}", region_->options().name),
      .options = options_->for_request()};
  const shm::GlobalRanks& global = group_->global_ranks();
  for (const int rank : ranks) {
    request.members.push_back(global.of(rank));
    if (!global.nodes().empty()) {
      request.nodes.push_back(global.nodes()[static_cast<std::size_t>(rank)]);
    }
  }
  if (options) {
    if (options->timeout.count() > 0) {
      request.timeout = distributed::checked_timeout(options->timeout);
    }
    if (!options->group_name.empty()) request.group_name = options->group_name;
    if (const auto* const ours = dynamic_cast<PacelineOptions*>(options.get())) {
      request.options = ours->for_request();
    }
  }
  using Self = c10::intrusive_ptr<PacelineBackend>;
  const c10::weak_intrusive_ptr<PacelineBackend> self(Self::unsafe_reclaim_from_nonowning(this));
  request.check_peers = [self, ranks] {
    if (const auto whole = self.lock()) whole->check_peers(ranks, {"split", 0});
  };
  add_inherited(request);
  return make_part(std::move(request));
}

c10::intrusive_ptr<c10d::Backend> PacelineBackend::make_part(
    distributed::BackendRequest part) const {
  return c10::make_intrusive<PacelineBackend>(form_region(std::move(part)));
}

// c10d passes only the device's index. The CPU has none, GPUs have one.
bool PacelineBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  return device < 0;
}

at::Tensor PacelineBackend::allocateTensor(long size, at::TensorOptions options) {
  if (options.device().type() != c10::DeviceType::CPU) {
    throw UsageError(fmt::format("allocate_tensor on {}: the backend paceline has CPU memory only",
                                 options.device().str()));
  }
  check_usable("allocate_tensor");
  std::size_t bytes = 0;
  if (size < 0 ||
      __builtin_mul_overflow(static_cast<std::size_t>(size), options.dtype().itemsize(), &bytes)) {
    throw UsageError(fmt::format("allocate_tensor of {} elements", size));
  }
  return at::from_blob(
      region_->allocate_or_throw(bytes), {size},
      [region = region_](void* pointer) { region->memory().free(pointer); }, options);
}

// In the arena of rank 0, which never hands it out again: it does not know when others are done.
at::Tensor PacelineBackend::allocate_shared(std::size_t bytes) {
  void* pointer = getRank() == 0 ? region_->memory().allocate(bytes) : nullptr;
  auto offset = at::full({1}, -1, at::kLong);
  if (pointer != nullptr) {
    region_->memory().retire(pointer);
    offset.fill_(static_cast<std::int64_t>(*region_->memory().shared_offset(pointer, bytes)));
  }
  std::vector<at::Tensor> tensors{offset};
  broadcast(tensors, {})->wait();
  if (getRank() != 0) {
    pointer = region_->memory().resolve(0, static_cast<std::uint64_t>(offset.item<std::int64_t>()),
                                        bytes);
  }
  if (pointer == nullptr) {
    throw Error(fmt::format("no room for {} bytes of shared memory in group {}", bytes,
                            region_->options().name));
  }
  return at::from_blob(
      pointer, {static_cast<std::int64_t>(bytes)}, [region = region_](void*) {}, at::kByte);
}

std::unordered_map<std::string, std::uint64_t> PacelineBackend::getMemoryStats() {
  const auto buffers = shm::Layout::kStagingBuffers * static_cast<std::uint64_t>(getSize());
  return {{"allocated_bytes", region_->memory().bytes_in_use()},
          {"staging_bytes", buffers * region_->memory().buffer_bytes()}};
}

std::unique_ptr<distributed::BucketReducer> PacelineBackend::make_bucket_reducer(
    const distributed::BucketReducer::Options& options) {
  return make_shm_bucket_reducer(options, [] { return nullptr; });
}

std::unique_ptr<distributed::BucketReducer> PacelineBackend::make_shm_bucket_reducer(
    const distributed::BucketReducer::Options& options,
    const std::function<std::shared_ptr<shm::SecondLevel>()>& make_between_nodes) {
  check_usable("DistributedDataParallel");
  std::unique_ptr<distributed::BucketReducer> reducer;
  progress_->run_here([&] {
    local_group_->set_timeout(timeout_);
    reducer = std::make_unique<ShmBucketReducer>(*local_group_, options, make_between_nodes());
  });
  return reducer;
}

}  // namespace paceline::backends
