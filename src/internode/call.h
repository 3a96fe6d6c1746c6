#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "internode/group.h"

namespace paceline::internode {

// The call that a Group makes. All ranks have agreed on it once it is constructed.
class Group::Call final : public shm::OuterCall {
 public:
  Call(Group& group, shm::CollectiveFingerprint call, const OwnSplits* splits = nullptr);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() {
    group_.local_.set_outer_call(nullptr);
    if (std::uncaught_exceptions() > exceptions_) group_.tell_failure();
  }

  shm::OpContext context() const override;
  shm::CallDeadline& deadline() override;
  std::string describe() const override;
  shm::RankSet missing_on_other_nodes(const shm::RankSet& missing) const override;
  bool may_learn_more(const shm::RankSet& missing) override;
  std::string describe_on_other_nodes(const shm::RankSet& ranks) const override;

 private:
  Group& group_;
  int exceptions_ = std::uncaught_exceptions();
  std::optional<base::Deadline> learning_;
};

// A transfer between nodes, under way from the constructor on until finish.
class Group::Exchange {
 public:
  Exchange(Group& group, const Messages& sends, const Messages& receives, std::uint32_t number);
  // `start` starts a transfer with these ranks of the group.
  using Start = std::function<std::unique_ptr<Engine::Transfer>(std::function<void()> when_done)>;
  Exchange(Group& group, const shm::RankSet& peers, const Start& start);
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Waits until it is complete.
  void finish();

 private:
  Group& group_;
  shm::RankSet peers_;  // global
  shm::Word done_ = 0;
  std::unique_ptr<Engine::Transfer> transfer_;  // none if there is nothing to move
};

}  // namespace paceline::internode
