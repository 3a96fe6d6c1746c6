#pragma once

#include <string>

#include "report/analysis/analysis.h"
#include "report/analysis/diagnosis.h"
#include "report/timelines/job.h"

namespace paceline::report {

// One HTML page that needs nothing else, and no script.
std::string report_page(const Job& job, const Analysis& analysis, const Verdict& verdict);

// Its parts, each a drawing or table without a heading. There must be a step.
std::string time_bars(const Analysis& analysis);
std::string typical_step(const Job& job, const Analysis& analysis, const Verdict& verdict);
std::string step_times(const Job& job, const Analysis& analysis, const Verdict& verdict);
std::string rank_table(const Analysis& analysis);
std::string wait_table(const Analysis& analysis);
std::string bucket_table(const Analysis& analysis);

// A colour and what it stands for; `colour` is a class of report_style.h.
std::string legend_entry(const char* colour, const char* meaning);

}  // namespace paceline::report
