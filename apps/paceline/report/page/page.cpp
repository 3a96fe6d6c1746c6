#include "report/page/page.h"

#include <fmt/format.h>

#include <vector>

#include "page/drawings.html.h"
#include "page/page.css.h"
#include "page/page.html.h"
#include "report/page/html.h"
#include "report/units.h"

namespace paceline::report {
namespace {

std::string list(const char* heading, const std::vector<std::string>& items) {
  if (items.empty()) return "";
  std::string html = fmt::format("<div><h2>{}</h2><ul>", heading);
  for (const std::string& item : items) html += "<li>" + escaped(item) + "</li>";
  return html + "</ul></div>\n";
}

std::vector<std::string> remedies_of(const Diagnosis& diagnosis) {
  std::vector<std::string> texts;
  for (const Remedy& remedy : diagnosis.remedies) {
    std::string& text = texts.emplace_back(remedy.text);
    if (remedy.prediction) text += " " + text_of(*remedy.prediction);
  }
  return texts;
}

std::string summary(const Analysis& a) {
  std::string text = fmt::format("{} rank{}, ", a.size, a.size == 1 ? "" : "s");
  if (a.group_size < a.size) text += fmt::format("of which {} train together, ", a.group_size);
  text += fmt::format("{} steps with a median of {}", a.steps.size(), time_text(a.period));
  text += fmt::format(". The first {} steps are left out as warm-up", a.warm_up);
  if (a.pauses > 0) {
    text += fmt::format(", and {} long pause{} between steps, {} of the whole time", a.pauses,
                        a.pauses == 1 ? "" : "s", share_text(a.pause_share));
  }
  text += '.';
  if (a.models > 1) {
    text += fmt::format(" Of {} models, model {} takes most time; its steps are shown.", a.models,
                        a.model);
  }
  return text;
}

std::string drawings(const Job& job, const Analysis& analysis, const Diagnosis& diagnosis) {
  const std::string named_rank_key =
      diagnosis.rank < 0
          ? ""
          : fmt::format("<span class=\"fault line\">computing, rank {}</span>\n", diagnosis.rank);
  return filled(kDrawingsHtml,
                {{"typical_number", std::to_string(analysis.steps[analysis.typical].number)},
                 {"typical_step", typical_step(job, analysis, diagnosis)},
                 {"time_bars", time_bars(analysis)},
                 {"rank_table", rank_table(analysis)},
                 {"named_rank_key", named_rank_key},
                 {"step_times", step_times(job, analysis, diagnosis)},
                 {"overlap", share_text(analysis.overlap)},
                 {"bucket_table", bucket_table(analysis)},
                 {"wait_table", wait_table(analysis)}});
}

}  // namespace

std::string report_page(const Job& job, const Analysis& analysis, const Diagnosis& diagnosis) {
  const std::string notes =
      job.notes.empty() ? "" : "<section>" + list("About the files", job.notes) + "</section>\n";
  return filled(kPageHtml,
                {{"style", std::string(kPageCss)},
                 {"diagnosis_class", diagnosis.finding == Finding::all_well ? " well" : ""},
                 {"summary", summary(analysis)},
                 {"sentence", escaped(diagnosis.sentence)},
                 {"why", list("Why", diagnosis.why)},
                 {"remedies", list("What to try", remedies_of(diagnosis))},
                 {"notes", notes},
                 {"drawings", analysis.steps.empty() ? "" : drawings(job, analysis, diagnosis)}});
}

}  // namespace paceline::report
