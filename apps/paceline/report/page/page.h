#pragma once

#include <string>

#include "report/analysis/analysis.h"
#include "report/analysis/diagnosis.h"
#include "report/timelines/job.h"

namespace paceline::report {

// One self-contained HTML page without scripts. Its Content-Security-Policy blocks scripts and
// requests, even if a name in a timeline injects one.
std::string report_page(const Job& job, const Analysis& analysis, const Diagnosis& diagnosis);

// The parts of drawings.html, each a drawing or table. There must be a step.
std::string time_bars(const Analysis& analysis);
std::string typical_step(const Job& job, const Analysis& analysis, const Diagnosis& diagnosis);
std::string step_times(const Job& job, const Analysis& analysis, const Diagnosis& diagnosis);
std::string rank_table(const Analysis& analysis);
std::string wait_table(const Analysis& analysis);
std::string bucket_table(const Analysis& analysis);

}  // namespace paceline::report
