#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "backends/paceline/hooks.h"
#include "distributed/reported_wait.h"
#include "shm/p2p/mailbox.h"

namespace paceline::backends {

// The Work of the backend paceline: complete when complete() has been called.
class PacelineWork : public distributed::SelfReportingWork {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  // A profiler, if there is one, shows it under the title and with the shapes of `inputs`.
  PacelineWork(c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
               std::vector<at::Tensor> outputs, std::uint64_t sequence,
               std::chrono::milliseconds timeout);

  // Runs the hooks. Returns the future if one was requested; the caller must settle it, which runs
  // its callbacks and may take long.
  FuturePtr complete(const std::exception_ptr& error, GroupHooks& hooks);
  void settle(c10::ivalue::Future& future) const;

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override { return outputs_; }
  FuturePtr getFuture() override;
  std::uint64_t getSequencenumber() const override { return sequence_; }
  std::chrono::milliseconds getTimeout() const override { return timeout_; }
  std::uint64_t getCompletionKey() const override { return key_; }

 protected:
  [[noreturn]] void throw_late(std::chrono::milliseconds timeout) const;
  // Throws in a forked child, where no thread would complete the work.
  void check_not_forked() const;

 private:
  std::vector<at::Tensor> outputs_;
  std::uint64_t sequence_;
  std::chrono::milliseconds timeout_;
  shm::OwningProcess process_;
  std::uint64_t key_;  // no other Work of this process has it
  FuturePtr future_;   // made on request
};

// The Work of a message. Waiting for it drives progress.
class MessageWork final : public PacelineWork {
 public:
  MessageWork(std::shared_ptr<shm::Mailbox> mailbox, c10d::OpType type, const char* title,
              const std::vector<at::Tensor>& tensors, const shm::P2PMessage& message)
      : PacelineWork(type, title, tensors, tensors, 0, message.timeout),
        mailbox_(std::move(mailbox)),
        message_(message) {}

  void set_source(int rank) { source_ = rank; }

  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override;

 private:
  std::shared_ptr<shm::Mailbox> mailbox_;
  shm::P2PMessage message_;
  std::atomic<int> source_{-1};
};

// Complete when all of them are.
class CoalescedWork final : public distributed::SelfReportingWork {
 public:
  explicit CoalescedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : distributed::SelfReportingWork(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace paceline::backends
