#include "shm/buckets/job_agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include <paceline/error.h>

namespace paceline::shm {
namespace {

// FNV-1a, 64 bits.
std::uint64_t fingerprint_of_buckets(const ControlBlocks& blocks) {
  std::uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&hash](std::uint64_t value) {
    for (int byte = 0; byte < 8; ++byte, value >>= 8) {
      hash = (hash ^ (value & 0xff)) * 0x100000001b3;
    }
  };
  add(blocks.parameters().size());
  for (const auto& [count, type, op] : blocks.buckets()) {
    add(count);
    add(static_cast<std::uint64_t>(type));
    add(static_cast<std::uint64_t>(op));
  }
  return hash;
}

std::string describe_exchange(const ControlBlocks& blocks, Exchanged what) {
  return fmt::format("the exchange of {} between nodes",
                     what ? blocks.name_of_bucket(*what) : "the step summaries");
}

}  // namespace

void fail_between_nodes(const ControlBlocks& blocks, const RankSet& ranks, Exchanged what) {
  Failure failure{FailureKind::peer_lost, ranks, {}};
  std::string why;
  try {
    throw;
  } catch (const PeerError& error) {
    const Failure cause = failure_of(error);
    failure.kind = cause.kind;
    if (!cause.ranks.empty()) failure.ranks = cause.ranks;
    why = cause.text;
  } catch (const std::exception& error) {
    why = error.what();
  }
  failure.text =
      fmt::format("in {} {} failed: {}", blocks.position(), describe_exchange(blocks, what), why);
  blocks.fail(failure);
}

std::string describe_at_fault(const RankSet& at_fault, const GlobalRanks& global_ranks) {
  return at_fault.empty() ? "an unknown rank" : global_ranks.describe_global(at_fault);
}

bool is_complete(const ControlBlocks& blocks, SecondLevel::Stage& stage, Exchanged what,
                 const GlobalRanks& global_ranks) {
  auto state = SecondLevel::Stage::State::under_way;
  try {
    state = stage.poll();
  } catch (...) {
    fail_between_nodes(blocks, stage.awaited(), what);
  }
  if (state != SecondLevel::Stage::State::aborted) {
    return state == SecondLevel::Stage::State::complete;
  }
  // A rank that leaves after a failure of the group aborts its exchanges too.
  blocks.region().check_usable({"backward", blocks.step()});
  const RankSet ranks = stage.at_fault();
  throw Mismatch(
      fmt::format("a rank aborted {} because of {}, before {}", blocks.position(),
                  describe_at_fault(ranks, global_ranks), describe_exchange(blocks, what)),
      ranks.list(), "backward", blocks.step());
}

JobAgreement::JobAgreement(const ControlBlocks& blocks, StepAgreement& agreement,
                           SecondLevel& between)
    : blocks_(blocks),
      agreement_(agreement),
      between_(between),
      global_ranks_(between.ranks(), between.nodes()),
      buckets_fingerprint_(fingerprint_of_buckets(blocks)) {}

bool JobAgreement::advance() {
  if (agreed_) return true;
  if (is_leader()) advance_leader();
  if (!Region::reached(blocks_.progress(0).gathered, blocks_.step())) return false;
  agreement_.set_from_job({blocks_.reports(0), between_.ranks().size()}, between_.here(),
                          global_ranks_);
  return agreed_ = true;
}

void JobAgreement::advance_leader() {
  if (phase_ == Phase::none) collect_reports();
  if (!is_complete(blocks_, *stage_, std::nullopt, global_ranks_)) return;
  stage_.reset();
  if (phase_ == Phase::reports) {
    reports_.resize(between_.ranks().size());
    std::memcpy(reports_.data(), all_.get(), reports_.size() * sizeof(RankReport));
    std::vector<StepSummary> summaries;
    for (const RankReport& report : reports_) summaries.push_back(report.summary);
    check(summaries);
    if (differ_in_frozen(summaries)) return collect_flags();
  } else {
    check_flags();
  }
  phase_ = Phase::none;
  std::ranges::copy(reports_, blocks_.reports(0));
  blocks_.region().publish(blocks_.own_progress().gathered, blocks_.step());
  blocks_.region().ring_peers();
}

void JobAgreement::collect_reports() {
  std::vector<RankReport> mine;
  for (int rank = 0; rank < blocks_.size(); ++rank) {
    const auto& progress = blocks_.progress(rank);
    mine.push_back({blocks_.summary_of(rank), progress.finished.load(std::memory_order_relaxed),
                    progress.weight.load(std::memory_order_relaxed), buckets_fingerprint_});
  }
  phase_ = Phase::reports;
  collect(0, std::as_bytes(std::span(mine)));
}

// Only names of parameters are still wanted, for the error.
void JobAgreement::collect_flags() {
  std::vector<std::uint8_t> mine;
  for (int rank = 0; rank < blocks_.size(); ++rank) {
    const std::uint8_t* const flags = blocks_.frozen_flags(rank);
    mine.insert(mine.end(), flags, flags + blocks_.parameters().size());
  }
  phase_ = Phase::flags;
  collect(1, std::as_bytes(std::span(mine)));
}

void JobAgreement::collect(std::uint32_t phase, std::span<const std::byte> mine) {
  const std::size_t each = mine.size() / between_.here().size();
  all_.reset(new std::byte[each * between_.ranks().size()], std::default_delete<std::byte[]>());
  try {
    stage_ = between_.gather({blocks_.step(), phase}, mine, all_);
  } catch (...) {
    fail_between_nodes(blocks_, {}, std::nullopt);
  }
}

void JobAgreement::check(std::span<const StepSummary> summaries) {
  check_buckets();
  check_finished();
  fail(compare_forwards(summaries, global_ranks_));
}

// The ranks of one node have compared theirs when the reducer was made.
void JobAgreement::check_buckets() {
  std::vector<std::string> plans;
  for (const RankReport& report : reports_)
    plans.push_back(std::to_string(report.buckets_fingerprint));
  if (std::ranges::all_of(plans, [&](const auto& plan) { return plan == plans[0]; })) return;
  const RankSet ranks = explain_disagreement(plans, global_ranks_).ranks;
  fail(
      {ranks, fmt::format("gradients are in different buckets on {}: DistributedDataParallel needs "
                          "the same options on every rank",
                          global_ranks_.describe(ranks))});
}

// On one node a step that a rank finished cannot be aborted; for other nodes this shows only now.
void JobAgreement::check_finished() {
  std::uint32_t newest = reports_[0].finished;
  for (const RankReport& report : reports_) {
    if (static_cast<std::int32_t>(report.finished - newest) > 0) newest = report.finished;
  }
  Disagreement behind;
  for (std::size_t rank = 0; rank < reports_.size(); ++rank) {
    if (reports_[rank].finished != newest) behind.ranks.insert(static_cast<int>(rank));
  }
  behind.text = fmt::format(
      "{} aborted step {}, which other nodes finished: an exception ended "
      "a backward there after all gradients were reduced, so the models may "
      "differ from here on",
      global_ranks_.describe(behind.ranks), newest);
  fail(behind);
}

void JobAgreement::check_flags() {
  const std::size_t each = blocks_.parameters().size();
  std::vector<FrozenFlags> flags;
  for (std::size_t rank = 0; rank < reports_.size(); ++rank) {
    const auto* const first = reinterpret_cast<const std::uint8_t*>(all_.get()) + rank * each;
    flags.emplace_back(first, reports_[rank].summary.joined != 0 ? 0 : each);
  }
  fail(compare_frozen(flags, blocks_.parameters(), global_ranks_));
}

void JobAgreement::fail(const Disagreement& disagreement) const {
  if (disagreement.ranks.empty()) return;
  blocks_.fail({FailureKind::mismatch, global_ranks_.of(disagreement.ranks),
                fmt::format("in {} {}", blocks_.position(), disagreement.text)});
}

void JobAgreement::check() {
  if (!stage_) return;
  try {
    stage_->check();
  } catch (...) {
    fail_between_nodes(blocks_, stage_->awaited(), std::nullopt);
  }
}

void JobAgreement::cancel() noexcept {
  if (stage_) stage_->cancel();
  stage_.reset();
  phase_ = Phase::none;
}

}  // namespace paceline::shm
