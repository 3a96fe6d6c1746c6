#include "report/json.h"

#include <nlohmann/json.hpp>

#include "report/analysis/explanation.h"

namespace paceline::report {
namespace {

using nlohmann::ordered_json;

constexpr int kVersion = 1;

ordered_json or_null(int number) {
  return number < 0 ? ordered_json() : ordered_json(number);
}

ordered_json or_null(const std::optional<double>& value) {
  return value ? ordered_json(*value) : ordered_json();
}

ordered_json expected_json(const Analysis& a) {
  const auto expected = expected_communication(a);
  return expected ? ordered_json(expected->sum()) : ordered_json();
}

ordered_json remedies_json(const Diagnosis& diagnosis) {
  auto remedies = ordered_json::array();
  for (const Remedy& remedy : diagnosis.remedies) {
    ordered_json& one = remedies.emplace_back(ordered_json{{"text", remedy.text}});
    one["prediction"] = ordered_json();
    if (!remedy.prediction) continue;
    one["prediction"] = {{"if", remedy.prediction->if_what},
                         {"before", remedy.prediction->before},
                         {"after", remedy.prediction->after}};
  }
  return remedies;
}

ordered_json shares_json(const Analysis& a) {
  return {{"computing", a.computing},
          {"late", a.late},
          {"communication", a.communication},
          {"between", a.between},
          {"stall", a.stall},
          {"pauses", a.pause_share},
          {"queued", or_null(a.queued)},
          {"queue_gain", or_null(a.queue_gain)},
          {"settled_stall", a.settled.stall},
          {"settled_communication", a.settled.communication},
          {"overlap", a.overlap},
          {"waiting_between", or_null(a.waiting_between)},
          {"asleep_in_steps", or_null(a.asleep_in_steps)},
          {"reading_between", or_null(a.reading_between)}};
}

ordered_json machine_json(const Analysis& a) {
  return {{"cores", a.cores > 0 ? ordered_json(a.cores) : ordered_json()},
          {"local_size", a.local_size},
          {"used", or_null(a.machine.used)},
          {"foreign", or_null(a.machine.foreign)},
          {"elsewhere", or_null(a.machine.elsewhere)},
          {"stolen", or_null(a.machine.stolen)},
          {"throttled", or_null(a.machine.throttled)},
          {"cpu_pressure", or_null(a.machine.cpu_pressure)},
          {"memory_pressure", or_null(a.machine.memory_pressure)},
          {"preempted", or_null(a.preempted)},
          {"faults", or_null(a.faults)}};
}

ordered_json ranks_json(const Analysis& a) {
  auto ranks = ordered_json::array();
  for (const RankTimes& one : a.ranks) {
    ranks.push_back({{"rank", one.rank},
                     {"computing", one.computing},
                     {"late", one.late},
                     {"communication", one.communication},
                     {"between", one.between},
                     {"queued", or_null(one.queued)}});
  }
  return ranks;
}

ordered_json buckets_json(const Analysis& a) {
  auto buckets = ordered_json::array();
  for (const BucketTimes& one : a.buckets) {
    buckets.push_back(
        {{"bucket", one.number},
         {"bytes", one.info.bytes > 0 ? ordered_json(one.info.bytes) : ordered_json()},
         {"under_way", one.under_way},
         {"late", one.late},
         {"communication", one.communication},
         {"parameters", one.info.parameters}});
  }
  return buckets;
}

}  // namespace

std::string report_json(const Job& job, const Analysis& a, const Diagnosis& diagnosis) {
  const ordered_json document = {{"version", kVersion},
                                 {"finding", name_of(diagnosis.finding)},
                                 {"rank", or_null(diagnosis.rank)},
                                 {"bucket", or_null(diagnosis.bucket)},
                                 {"sentence", diagnosis.sentence},
                                 {"why", diagnosis.why},
                                 {"remedies", remedies_json(diagnosis)},
                                 {"ranks", a.size},
                                 {"group_size", a.group_size},
                                 {"steps", a.steps.size()},
                                 {"warm_up", a.warm_up},
                                 {"pauses", a.pauses},
                                 {"period", a.period},
                                 {"mean_period", a.mean_period},
                                 {"expected_communication", expected_json(a)},
                                 {"shares", shares_json(a)},
                                 {"machine", machine_json(a)},
                                 {"times", ranks_json(a)},
                                 {"buckets", buckets_json(a)},
                                 {"notes", job.notes}};
  // A terminal may obey control characters beyond ASCII, so these are escaped.
  return document.dump(2, ' ', true, ordered_json::error_handler_t::replace);
}

}  // namespace paceline::report
