#include "backends/paceline/reconfigurable_backend.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>
#include <variant>

#include <paceline/error.h>

#include "base/deadline.h"
#include "base/hash.h"
#include "distributed/hook_scope.h"
#include "distributed/make_group.h"
#include "shm/membership/reconfigure_handle.h"

namespace paceline::backends {
namespace {

constexpr const char* kAborted = "abort was called";

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
  options_->set(region_options_);
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

void ReconfigurableBackend::check_not_forked(const char* operation) const {
  if (!process_.is_forked_child()) return;
  throw UsageError(
      fmt::format("{} in a forked child: group {} belongs to the parent process. Start new "
                  "processes instead of "
                  "forking",
                  operation, region_options_.name));
}

c10d::ReconfigureHandle ReconfigurableBackend::get_reconfigure_handle() const {
  check_not_forked("get_reconfigure_handle");
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
  std::string own;
  {
    const std::lock_guard lock(mutex_);
    own = listening_.endpoint.socket;
  }
  const std::string machine = shm::machine_identity();
  Members members;
  for (const std::string& handle : handles) {
    const auto endpoint = shm::ReconfigureHandle::decode(handle).endpoint;
    const std::size_t position = members.endpoints.size();
    if (endpoint.machine != machine) {
      throw UsageError(fmt::format(
          "reconfigure: the process of handle {} runs on another machine, or in another network "
          "namespace; ranks that change have to be on one machine",
          position));
    }
    const auto same = std::ranges::find(members.endpoints, endpoint.socket, &shm::Endpoint::socket);
    if (same != members.endpoints.end()) {
      throw UsageError(fmt::format("reconfigure: handles {} and {} are of the same process",
                                   same - members.endpoints.begin(), position));
    }
    if (endpoint.socket == own) members.own = static_cast<int>(position);
    members.endpoints.push_back(endpoint);
  }
  if (members.own < 0) {
    throw UsageError(fmt::format(
        "reconfigure of group {}: this rank's own handle is not among the {} given. A handle "
        "serves "
        "for one reconfigure: exchange those that get_reconfigure_handle gives after the last one",
        region_options_.name, handles.size()));
  }
  members.group = base::hash(fmt::format("{} {}", options.uuid, fmt::join(handles, " ")));
  return members;
}

ReconfigurableBackend::WorkPtr ReconfigurableBackend::reconfigure(
    const c10d::ReconfigureOptions& options) {
  check_not_forked("reconfigure");
  distributed::HookScope::check_not_active("reconfigure");
  // Waiting for the other call could last for ever: it may wait for this thread's callback.
  const std::unique_lock one_at_a_time(reconfiguring_, std::try_to_lock);
  if (!one_at_a_time) {
    throw UsageError(
        fmt::format("reconfigure of group {} while another thread does so", region_options_.name));
  }
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
  int aborts = 0;
  {
    const std::lock_guard lock(mutex_);
    std::swap(listening_, next);
    aborts = aborts_;
  }
  auto region = shm::Region::create(members.endpoints, members.own, std::move(next.listener),
                                    members.group, region_options);
  set_group(make_(std::move(region)), aborts);
  return complete_work();
}

void ReconfigurableBackend::set_group(Group group, int aborts) {
  group->share_hooks(hooks_);
  group->setTimeout(options_->timeout);
  const std::lock_guard lock(mutex_);
  if (aborts_ != aborts) {
    group->abort_because(kAborted);
    throw Error(
        fmt::format("reconfigure of group {}: {} meanwhile", region_options_.name, kAborted));
  }
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
  if (!group->is_idle()) group->abort_because("reconfigure was called");
  group->shutdown();
}

void ReconfigurableBackend::abort() {
  distributed::HookScope::check_not_active("abort");
  {
    const std::lock_guard lock(mutex_);
    ++aborts_;
  }
  abort_because(kAborted);
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
  timeout = distributed::checked_timeout(timeout);
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

bool ReconfigurableBackend::has_failed() const {
  const auto group = present();
  return group && group->has_failed();
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
