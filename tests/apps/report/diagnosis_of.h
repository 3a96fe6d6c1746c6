#pragma once

#include "report/analysis/analysis.h"
#include "report/analysis/diagnosis.h"
#include "support/made_timelines.h"

namespace paceline::report {

inline Analysis analysis_of(const test::MadeJob& job) {
  return analyse(merge(test::make_timelines(job)));
}

inline Diagnosis diagnosis_of(const test::MadeJob& job) {
  return diagnose(analysis_of(job));
}

// What the first remedy promises.
inline Prediction prediction_of(const Diagnosis& diagnosis) {
  if (diagnosis.remedies.empty() || !diagnosis.remedies[0].prediction) return {};
  return *diagnosis.remedies[0].prediction;
}

inline double never(int, int) {
  return 0;
}

// 1 of 10 ms is between steps; of 9, rank 1 computes all and rank 0 six.
inline test::MadeJob straggling() {
  return {.computing = [](int rank, int) { return rank == 1 ? 9000.0 : 6000.0; },
          .between = [](int, int) { return 1000.0; }};
}

}  // namespace paceline::report
