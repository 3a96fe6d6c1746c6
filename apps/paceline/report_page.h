#pragma once

#include <string>

#include "trace/analysis.h"
#include "trace/diagnosis.h"
#include "trace/job.h"

namespace paceline::app {

// One HTML page that needs nothing else, and no script.
std::string report_page(const trace::Job& job, const trace::Analysis& analysis,
                        const trace::Verdict& verdict);

// Its parts, each a drawing or table without a heading. There must be a step.
std::string time_bars(const trace::Analysis& analysis);
std::string typical_step(const trace::Job& job, const trace::Analysis& analysis,
                         const trace::Verdict& verdict);
std::string step_times(const trace::Job& job, const trace::Analysis& analysis,
                       const trace::Verdict& verdict);
std::string rank_table(const trace::Analysis& analysis);
std::string wait_table(const trace::Analysis& analysis);
std::string bucket_table(const trace::Analysis& analysis);

// A colour and what it stands for; `colour` is a class of report_style.h.
std::string legend_entry(const char* colour, const char* meaning);

}  // namespace paceline::app
