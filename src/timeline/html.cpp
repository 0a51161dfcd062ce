#include <algorithm>
#include <string_view>

#include "timeline/report.hpp"
#include "timeline/report_page.hpp"

namespace accelerate::timeline {
namespace {

/// "12c3e": twelve parts of one letter, three of another.
std::string in_runs(const std::vector<char>& picture) {
  std::string text;
  for (size_t begin = 0, end = 0; begin < picture.size(); begin = end) {
    while (end < picture.size() && picture[end] == picture[begin]) ++end;
    text += std::to_string(end - begin) + picture[begin];
  }
  return text;
}

}  // namespace

std::string to_html(const Report& report, const std::string& title) {
  auto json = to_json(report);
  const size_t pictures = std::max<size_t>(1, kMostPictures / report.ranks.size());
  json["title"] = title;
  json["picture_parts"] = kPictureParts;
  json["pictures"] = pictures;
  for (size_t rank = 0; rank < report.ranks.size(); ++rank)
    for (size_t step = 0; step < std::min(pictures, report.ranks[rank].steps.size()); ++step)
      json["ranks"][rank]["steps"][step]["picture"] = in_runs(report.ranks[rank].steps[step].picture);
  std::string data = json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace), safe;
  for (const char letter : data)  // nothing in it ends the script
    if (letter == '<') safe += "\\u003c";
    else safe += letter;
  std::string page = kReportPage;
  const std::string_view place = "REPORT_JSON";
  return page.replace(page.find(place), place.size(), safe);
}

}  // namespace accelerate::timeline
