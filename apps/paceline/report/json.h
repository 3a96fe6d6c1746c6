#pragma once

#include <string>

#include "report/analysis/analysis.h"
#include "report/analysis/diagnosis.h"
#include "report/timelines/job.h"

namespace paceline::report {

// The document of `paceline report --json`, which docs/timeline.md describes.
std::string report_json(const Job& job, const Analysis& analysis, const Diagnosis& diagnosis);

}  // namespace paceline::report
