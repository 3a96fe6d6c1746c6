#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace paceline::drawing {

// The characters of a text, each as UTF-8. Control characters, and bytes that are not UTF-8, become
// U+FFFD: an SVG must not have them.
std::vector<std::string> characters(std::string_view text);

// How many columns of a terminal a text takes.
int columns_of(std::string_view text);

// The text's first `columns` characters; if there are more, the last one is replaced by "~".
std::string cut_to(std::string_view text, int columns);

// The words of a text, without the spaces between them.
std::vector<std::string> words_of(std::string_view text);

// For XML and its attributes.
std::string escaped(std::string_view text);

}  // namespace paceline::drawing
