#include "backends/paceline/backend.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <paceline/error.h>

#include <algorithm>
#include <new>

#include "backends/paceline/node_channel.h"
#include "distributed/store_exchange.h"

namespace paceline::backends {
namespace {

const bool paceline_registered = distributed::register_backend(
    "paceline", {[](distributed::BackendRequest request) -> c10::intrusive_ptr<c10d::Backend> {
                   return c10::make_intrusive<NodeBackend>(form_region(std::move(request)));
                 },
                 c10d::ProcessGroup::BackendType::CUSTOM});

}  // namespace

std::shared_ptr<node::Region> form_region(distributed::BackendRequest request) {
  node::RegionOptions options{.name = request.group_name,
                              .numbers = node::RankNumbers(request.world_ranks),
                              .timeout = request.timeout};
  options.staging_bytes = request.staging_bytes.value_or(options.staging_bytes);
  if (!request.links.empty() || request.size == 1) {
    return node::Region::create(std::move(request.links), request.rank, request.size, options);
  }
  distributed::StoreExchange exchange(request);
  return node::Region::create(exchange, options);
}

NodeBackend::NodeBackend(std::shared_ptr<node::Region> region)
    : ExtendedBackend(region->rank(), region->size()),
      region_(std::move(region)),
      group_(region_),
      mailbox_(std::make_shared<node::Mailbox>(region_)),
      monitored_barrier_(region_),
      options_(c10::make_intrusive<NodeOptions>(region_->options().timeout)),
      timeout_(region_->options().timeout),
      progress_(std::make_unique<ProgressThreads>()),
      postman_(std::make_unique<Postman>(mailbox_)) {
  options_->group_name = region_->options().name;
  options_->staging_bytes = region_->options().staging_bytes;
  for (int rank = 0; rank < region_->size(); ++rank) {
    options_->global_ranks_in_group.push_back(
        static_cast<std::uint64_t>(region_->numbers().of(rank)));
  }
}

NodeBackend::~NodeBackend() {
  shutdown();
  const bool forked = region_->in_forked_child();
  if (forked || progress_->abandoned()) static_cast<void>(progress_.release());
  if (forked || postman_->abandoned()) static_cast<void>(postman_.release());
  if (forked || callbacks_->abandoned()) {
    static_cast<void>(new (std::nothrow) std::shared_ptr<ProgressThreads>(callbacks_));
  }
}

void NodeBackend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  options_->timeout = timeout;
}

std::chrono::milliseconds NodeBackend::limit(std::chrono::milliseconds timeout) const {
  return timeout > std::chrono::milliseconds(0) ? timeout : timeout_.load();
}

void NodeBackend::shutdown() {
  if (region_->in_forked_child()) return;
  progress_->stop();
  postman_->stop();
  mailbox_->close();
  callbacks_->stop();
  region_->depart();
}

// Asked before a thread of ours is: a forked child has none of them.
void NodeBackend::check_usable(const char* operation) const {
  region_->check_usable({operation, sequence_ + 1});
  if (!progress_->stopped()) return;
  throw UsageError(
      fmt::format("{} on group {}, which this rank has left", operation, region_->options().name));
}

c10d::ErrorType NodeBackend::getError() {
  switch (region_->failure().kind) {
    case node::FailureKind::none:
      return c10d::ErrorType::SUCCESS;
    case node::FailureKind::timeout:
      return c10d::ErrorType::TIMEOUT;
    case node::FailureKind::peer_lost:
      return c10d::ErrorType::REMOTE_ERROR;
    case node::FailureKind::mismatch:
      break;
  }
  return c10d::ErrorType::COMM_ERROR;
}

void NodeBackend::abort_because(const std::string& text) noexcept {
  region_->abort(text);
}

std::shared_ptr<node::Region> NodeBackend::split_region(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& options) const {
  const auto own = std::find(ranks.begin(), ranks.end(), getRank());
  if (own == ranks.end()) return nullptr;
  distributed::BackendRequest request{
      .store = store,
      .rank = static_cast<int>(own - ranks.begin()),
      .size = static_cast<int>(ranks.size()),
      .timeout = timeout_.load(),
      .group_name = fmt::format("split of {}", region_->options().name),
      .staging_bytes = options_->staging_bytes};
  for (const int rank : ranks) request.world_ranks.push_back(region_->numbers().of(rank));
  if (options) {
    request.timeout = options->timeout;
    if (!options->group_name.empty()) request.group_name = options->group_name;
    if (const auto* const ours = dynamic_cast<NodeOptions*>(options.get())) {
      request.staging_bytes = ours->staging_bytes;
    }
  }
  return form_region(std::move(request));
}

c10::intrusive_ptr<c10d::Backend> NodeBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<Options>& options) {
  auto region = split_region(store, ranks, options);
  if (!region) return {};
  return c10::make_intrusive<NodeBackend>(std::move(region));
}

// The index is all that is told of a device. That of the CPU has none; GPUs have.
bool NodeBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  return device < 0;
}

at::Tensor NodeBackend::allocateTensor(long size, at::TensorOptions options) {
  if (options.device().type() != c10::DeviceType::CPU) {
    throw UsageError(fmt::format("allocateTensor on {}: the backend paceline has CPU memory only",
                                 options.device().str()));
  }
  check_usable("allocateTensor");
  std::size_t bytes = 0;
  if (size < 0 ||
      __builtin_mul_overflow(static_cast<std::size_t>(size), options.dtype().itemsize(), &bytes)) {
    throw UsageError(fmt::format("allocateTensor of {} elements", size));
  }
  return at::from_blob(
      region_->allocate_or_throw(bytes), {size},
      [region = region_](void* pointer) { region->free(pointer); }, options);
}

std::unordered_map<std::string, std::uint64_t> NodeBackend::getMemoryStats() {
  const std::uint64_t buffers = 4 * static_cast<std::uint64_t>(getSize());
  return {{"allocated_bytes", region_->bytes_in_use()},
          {"staging_bytes", buffers * region_->buffer_bytes()}};
}

std::unique_ptr<distributed::BucketChannel> NodeBackend::make_bucket_channel(
    const std::vector<distributed::BucketChannel::Bucket>& buckets,
    distributed::BucketChannel::Describe describe, std::uint32_t steps,
    const std::vector<std::string>& parameters) {
  check_usable("DistributedDataParallel");
  std::unique_ptr<distributed::BucketChannel> channel;
  progress_->run_here([&] {
    group_.set_timeout(timeout_);
    channel =
        std::make_unique<NodeChannel>(group_, buckets, std::move(describe), steps, parameters);
  });
  return channel;
}

}  // namespace paceline::backends
