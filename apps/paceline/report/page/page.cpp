#include "report/page/page.h"

#include <fmt/format.h>

#include <vector>

#include "report/page/html.h"
#include "report/page/style.h"
#include "report/units.h"

namespace paceline::report {
namespace {

// Would keep a script from running, and anything from being fetched, even if one got in.
constexpr const char* kHead = R"(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none';style-src 'unsafe-inline'">
<title>Timeline</title><style>)";

std::string list(const char* heading, const std::vector<std::string>& items) {
  if (items.empty()) return "";
  std::string html = fmt::format("<div><h2>{}</h2><ul>", heading);
  for (const std::string& item : items) html += "<li>" + escaped(item) + "</li>";
  return html + "</ul></div>\n";
}

std::string section(const std::string& heading, const std::string& caption,
                    const std::string& content) {
  return fmt::format("<section><h2>{}</h2><p class=soft>{}</p>\n{}</section>\n", heading, caption,
                     content);
}

std::string summary(const Analysis& a) {
  std::string text = fmt::format("{} rank{}, {} steps; one takes {}", a.size,
                                 a.size == 1 ? "" : "s", a.steps.size(), time_text(a.period));
  text += fmt::format(". The first {} steps are left out as warm-up", a.warm_up);
  if (a.pauses > 0) {
    text += fmt::format(", and {} long pause{} between steps, {} of the whole time", a.pauses,
                        a.pauses == 1 ? "" : "s", share_text(a.pause_share));
  }
  text += ".";
  if (a.models > 1) {
    text += fmt::format(" Of {} models, model {} takes most time; its steps are shown.", a.models,
                        a.model);
  }
  return text;
}

std::string verdict_section(const Analysis& analysis, const Verdict& verdict) {
  return fmt::format(
      "<section class=\"verdict{}\"><p class=soft>{}</p><h1>{}</h1>\n"
      "<div class=columns>{}{}</div></section>\n",
      verdict.finding == Finding::all_well ? " well" : "", summary(analysis),
      escaped(verdict.sentence), list("Why", verdict.why), list("What to try", verdict.remedies));
}

std::string drawings(const Job& job, const Analysis& analysis, const Verdict& verdict) {
  const Step& typical = analysis.steps[analysis.typical];
  return section("A typical step",
                 fmt::format("Step {}, of median length. Each rank computes (upper bar) while its "
                             "buckets are reduced (below). Hover over a bar for its times.",
                             typical.number),
                 typical_step(job, analysis, verdict)) +
         section("Where the time goes", "Of each rank, the mean of all steps.",
                 time_bars(analysis) + rank_table(analysis)) +
         section(
             "Step time",
             "From the begin of a step to that of the next. What lies between a rank's line and "
             "the whole step is waiting and the time between steps.",
             step_times(job, analysis, verdict)) +
         section(
             "Overlap",
             fmt::format("{} of the communication was hidden behind backward: of the time in "
                         "which buckets were under way, the part within backward and not within "
                         "a wait.",
                         share_text(analysis.overlap)),
             bucket_table(analysis)) +
         section("Who waits for whom",
                 "Time a step, until the last rank has published its gradients.",
                 wait_table(analysis));
}

}  // namespace

std::string report_page(const Job& job, const Analysis& analysis, const Verdict& verdict) {
  std::string page = kHead;
  page += kStyle;
  page += "</style></head><body><main>\n";
  page += verdict_section(analysis, verdict);
  if (!job.notes.empty()) page += "<section>" + list("About the files", job.notes) + "</section>\n";
  if (!analysis.steps.empty()) page += drawings(job, analysis, verdict);
  return page + "</main></body></html>\n";
}

}  // namespace paceline::report
