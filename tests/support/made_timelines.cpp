#include "support/made_timelines.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include "trace/format.h"

namespace paceline::test {
namespace {

using trace::Clock;
using trace::Kind;

Clock::time_point at(double microseconds) {
  const auto time = std::chrono::duration<double, std::micro>(microseconds);
  return Clock::time_point(std::chrono::hours(1)) + std::chrono::round<Clock::duration>(time);
}

// One step of all ranks; `now` is the time of each rank.
class MadeStep {
 public:
  MadeStep(const MadeJob& job, int number, std::vector<report::RankTrace>& traces,
           std::vector<double>& now)
      : job_(job), number_(number), traces_(traces), now_(now) {}

  void make() {
    double reduced = 0;
    for (int bucket = 0; bucket < job_.buckets; ++bucket) {
      double published = 0;
      for (int rank = 0; rank < job_.ranks; ++rank) {
        if (publication(rank, bucket) > published) last_rank_ = rank;
        published = std::max(published, publication(rank, bucket));
      }
      reduced = std::max(reduced, published) + job_.reduction;
      if (bucket == job_.buckets - 1) reduced += job_.delay(number_);
      published_.push_back(published);
      reduced_.push_back(reduced);
    }
    for (int rank = 0; rank < job_.ranks; ++rank) make_spans(rank);
    for (int rank = 0; rank < job_.ranks; ++rank) {
      now_[static_cast<std::size_t>(rank)] = reduced + job_.between(rank, number_);
    }
  }

 private:
  double arrival(int rank) const { return now_[static_cast<std::size_t>(rank)]; }
  double begin(int rank) const { return job_.meets ? std::ranges::max(now_) : arrival(rank); }
  double forward(int rank) const { return job_.computing(rank, number_) / 3; }
  double publication(int rank, int bucket) const {
    return begin(rank) + forward(rank) * (1 + 2.0 * (bucket + 1) / job_.buckets);
  }

  void make_spans(int rank) {
    const double forward_end = begin(rank) + forward(rank);
    const double end = reduced_.back();
    if (job_.meets) add(rank, Kind::pre_forward_sync, arrival(rank), begin(rank));
    add(rank, Kind::forward, begin(rank), forward_end);
    double waited = publication(rank, job_.buckets - 1);
    for (int bucket = 0; bucket < job_.buckets; ++bucket) {
      const double reduced = reduced_[static_cast<std::size_t>(bucket)];
      const double published = published_[static_cast<std::size_t>(bucket)];
      add(rank, Kind::bucket, publication(rank, bucket), reduced, bucket);
      if (published > waited) {
        add(rank, Kind::wait, waited, published, bucket, last_rank_);
        waited = published;
      }
      if (reduced > waited) {
        add(rank, Kind::wait, waited, reduced, bucket);
        waited = reduced;
      }
    }
    add(rank, Kind::backward, forward_end, end);
    add(rank, Kind::step, arrival(rank), end);
    sample(rank, end);
  }

  void sample(int rank, double end) {
    if (!job_.queued) return;
    auto& samples = traces_[static_cast<std::size_t>(rank)].thread;
    trace::ThreadUse use = samples.empty() ? trace::ThreadUse{.queued = 0} : samples.back();
    use.at = at(arrival(rank));
    samples.push_back(use);
    use.at = at(end);
    const double queued = job_.queued(rank, number_);
    use.cpu += std::llround(job_.computing(rank, number_) - queued);
    use.queued += std::llround(queued + (rank == 0 ? job_.delay(number_) : 0));
    samples.push_back(use);
  }

  void add(int rank, Kind kind, double begin, double end, int bucket = -1, int peer = -1) {
    traces_[static_cast<std::size_t>(rank)].spans.push_back(
        {kind, 0, static_cast<std::uint64_t>(number_), bucket, peer == rank ? -1 : peer, at(begin),
         at(end)});
  }

  const MadeJob& job_;
  int number_;
  std::vector<report::RankTrace>& traces_;
  std::vector<double>& now_;
  std::vector<double> published_;  // by all ranks, by bucket
  std::vector<double> reduced_;
  int last_rank_ = 0;
};

}  // namespace

std::vector<report::RankTrace> make_timelines(const MadeJob& job) {
  std::vector<report::RankTrace> traces;
  for (int rank = 0; rank < job.ranks; ++rank) {
    report::RankTrace& trace = traces.emplace_back();
    trace.path = fmt::format("rank{}.json", rank);
    trace.rank = rank;
    trace.size = job.ranks;
    trace.boot = "boot";
    for (int bucket = 0; bucket < job.buckets; ++bucket) {
      const int layer = job.buckets - bucket;
      trace.buckets[{0, bucket}] = {job.bytes,
                                    fmt::format("layers.{0}.weight, layers.{0}.bias", layer)};
    }
  }
  std::vector<double> now(traces.size());
  for (int step = 1; step <= job.steps; ++step) MadeStep(job, step, traces, now).make();
  return traces;
}

void write_timelines(const std::filesystem::path& directory,
                     const std::vector<report::RankTrace>& traces) {
  for (const report::RankTrace& trace : traces) {
    std::string text = trace::job_event(trace.rank, trace.size);
    for (const auto& [key, bucket] : trace.buckets) {
      text +=
          trace::bucket_event(trace.rank, key.first, key.second, bucket.bytes, bucket.parameters);
    }
    for (const trace::CpuUse& use : trace.cpu) text += trace::cpu_event(trace.rank, use);
    for (const trace::ThreadUse& use : trace.thread) {
      trace::append_thread_event(text, trace.rank, use);
    }
    for (const auto* const spans : {&trace.spans, &trace.device_spans}) {
      for (const trace::Span& span : *spans) trace::append_span(text, trace.rank, span);
    }
    text[0] = '[';
    std::ofstream(directory / trace.path) << text << "\n]\n";
  }
}

}  // namespace paceline::test
