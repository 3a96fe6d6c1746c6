#include "backends/paceline/reconfigurable_backend.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>
#include <variant>

#include <paceline/error.h>

#include "base/deadline.h"
#include "base/hash.h"
#include "shm/membership/reconfigure_handle.h"

namespace paceline::backends {
namespace {

// A set of handles has the order of the ranks before, so that these change as little as possible.
std::vector<std::string> in_order(const c10d::ReconfigureOptions& options) {
  if (const auto* const list = std::get_if<std::vector<std::string>>(&options.handles)) {
    return *list;
  }
  const auto& set = std::get<std::unordered_set<std::string>>(options.handles);
  std::vector<std::pair<int, std::string>> by_rank;
  for (const std::string& handle : set) {
    by_rank.emplace_back(shm::ReconfigureHandle::decode(handle).rank, handle);
  }
  std::sort(by_rank.begin(), by_rank.end());
  std::vector<std::string> handles;
  for (auto& [rank, handle] : by_rank) handles.push_back(std::move(handle));
  return handles;
}

c10::intrusive_ptr<c10d::Work> complete_work() {
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  future->markCompleted(c10::IValue(std::vector<at::Tensor>()));
  return c10d::Work::create_from_future(future);
}

}  // namespace

ReconfigurableBackend::ReconfigurableBackend(const distributed::BackendRequest& request, Make make)
    : ExtendedBackend(request.rank, request.size),
      make_(std::move(make)),
      region_options_(region_options(request)),
      options_(c10::make_intrusive<PacelineOptions>(request.timeout)) {
  region_options_.global_ranks = {};
  options_->group_name = request.group_name;
  options_->staging_bytes = region_options_.staging_bytes;
  options_->enable_reconfigure = true;
}

ReconfigurableBackend::~ReconfigurableBackend() = default;

ReconfigurableBackend::Group ReconfigurableBackend::present() const {
  const std::lock_guard lock(mutex_);
  return group_;
}

ReconfigurableBackend::Group ReconfigurableBackend::group(const char* operation) const {
  if (auto group = present()) return group;
  throw UsageError(fmt::format(
      "{} on group {}, which has no ranks: it was made with enable_reconfigure, so call "
      "reconfigure first, and again after abort and after a reconfigure that failed",
      operation, region_options_.name));
}

c10d::ReconfigureHandle ReconfigurableBackend::get_reconfigure_handle() const {
  const std::lock_guard lock(mutex_);
  return shm::ReconfigureHandle{getRank(), listening_.endpoint}.encode();
}

ReconfigurableBackend::Members ReconfigurableBackend::checked_members(
    const c10d::ReconfigureOptions& options) const {
  if (uuids_.contains(options.uuid)) {
    throw UsageError(fmt::format(
        "reconfigure of group {}: the uuid {} was already used; pass a new one to each reconfigure",
        region_options_.name, options.uuid));
  }
  if (!options.hints.empty()) {
    throw UsageError(fmt::format("reconfigure: the backend paceline has no hint '{}'",
                                 options.hints.begin()->first));
  }
  const std::vector<std::string> handles = in_order(options);
  if (handles.empty() || handles.size() > static_cast<std::size_t>(shm::kMaxRanks)) {
    throw UsageError(fmt::format("reconfigure with {} handles: a group has from 1 to {} ranks",
                                 handles.size(), shm::kMaxRanks));
  }
  Members members;
  for (const std::string& handle : handles) {
    members.endpoints.push_back(shm::ReconfigureHandle::decode(handle).endpoint);
  }
  if (std::set(handles.begin(), handles.end()).size() < handles.size()) {
    throw UsageError("reconfigure: a handle is there twice");
  }
  const auto own = std::ranges::find(handles, get_reconfigure_handle());
  if (own == handles.end()) {
    throw UsageError(fmt::format(
        "reconfigure of group {}: this rank's own handle is not among the {} given. A handle "
        "serves "
        "for one reconfigure: exchange those that get_reconfigure_handle gives after the last one",
        region_options_.name, handles.size()));
  }
  members.own = static_cast<int>(own - handles.begin());
  members.group = base::hash(fmt::format("{} {}", options.uuid, fmt::join(handles, " ")));
  return members;
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::reconfigure(
    const c10d::ReconfigureOptions& options) {
  const std::lock_guard one_at_a_time(reconfiguring_);
  const Members members = checked_members(options);
  auto region_options = region_options_;
  region_options.timeout = options_->timeout;
  if (options.timeout) {
    if (*options.timeout <= std::chrono::milliseconds(0)) {
      throw UsageError(fmt::format("reconfigure: a timeout of {} ms: it must be positive",
                                   options.timeout->count()));
    }
    region_options.timeout = std::min(*options.timeout, base::Deadline::kLongest);
  }

  uuids_.insert(options.uuid);
  leave_group();
  shm::ListeningEndpoint next;
  {
    const std::lock_guard lock(mutex_);
    std::swap(listening_, next);
  }
  auto region = shm::Region::create(members.endpoints, members.own, std::move(next.listener),
                                    members.group, region_options);
  set_group(make_(std::move(region)));
  return complete_work();
}

void ReconfigurableBackend::set_group(Group group) {
  group->share_hooks(hooks_);
  group->setTimeout(options_->timeout);
  const std::lock_guard lock(mutex_);
  rank_ = group->getRank();
  size_ = group->getSize();
  group_ = std::move(group);
}

// Calls that are under way, as after the loss of a rank, must not keep this one waiting.
void ReconfigurableBackend::leave_group() {
  Group group;
  {
    const std::lock_guard lock(mutex_);
    std::swap(group, group_);
  }
  if (!group) return;
  if (group->is_busy_with(group->call_count())) group->abort_because("it reconfigures its group");
  group->shutdown();
}

void ReconfigurableBackend::abort() {
  abort_because("abort was called");
  leave_group();
}

void ReconfigurableBackend::shutdown() {
  if (const auto group = present()) group->shutdown();
}

c10d::ErrorType ReconfigurableBackend::getError() {
  const auto group = present();
  return group ? group->getError() : c10d::ErrorType::SUCCESS;
}

void ReconfigurableBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  if (const auto group = present()) group->setTimeout(timeout);
}

std::uint64_t ReconfigurableBackend::getSequenceNumberForGroup() {
  const auto group = present();
  return group ? group->getSequenceNumberForGroup() : 0;
}

void ReconfigurableBackend::abort_because(const std::string& text) noexcept {
  if (const auto group = present()) group->abort_because(text);
}

void ReconfigurableBackend::check_peers(const std::vector<int>& needed, const shm::OpContext& op) {
  if (const auto group = present()) group->check_peers(needed, op);
}

std::uint64_t ReconfigurableBackend::call_count() {
  const auto group = present();
  return group ? group->call_count() : 0;
}

bool ReconfigurableBackend::is_busy_with(std::uint64_t calls) {
  const auto group = present();
  return group && group->is_busy_with(calls);
}

}  // namespace paceline::backends
