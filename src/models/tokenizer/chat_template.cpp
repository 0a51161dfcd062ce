#include <algorithm>
#include <utility>
#include <vector>

#include "models/replaced.hpp"
#include "models/tokenizer/content.hpp"
#include "utils/raise.hpp"

namespace accelerate::models {
namespace {

/// ChatML, possibly with a system message for conversations that have none.
struct ChatMl {
  std::optional<std::string> default_system;
};

constexpr std::string_view kSpace = " \t\n\v\f\r";

/// Replaces marks, and takes away the characters `before` and `after` each. In one pass without recursion, which
/// regular expressions don't promise: templates come from files.
std::string tightened(std::string_view text, const std::vector<std::pair<std::string_view, std::string_view>>& marks,
                      std::string_view before, std::string_view after) {
  std::string result;
  while (!text.empty()) {
    const auto mark =
        std::find_if(marks.begin(), marks.end(), [&](const auto& row) { return text.starts_with(row.first); });
    if (mark == marks.end()) {
      result += text.front();
      text.remove_prefix(1);
      continue;
    }
    while (!result.empty() && before.find(result.back()) != before.npos) result.pop_back();
    result += mark->second;
    text.remove_prefix(mark->first.size());
    text.remove_prefix(std::min(text.find_first_not_of(after), text.size()));
  }
  return result;
}

/// Takes away the blanks before a block at the beginning of a line.
std::string without_indents(std::string_view text) {
  std::string result;
  size_t line = 0;  // where it begins in the result, if it has had blanks only
  for (size_t i = 0; i < text.size(); ++i) {
    if (line != result.npos && text.substr(i).starts_with("{%")) result.resize(line);
    result += text[i];
    if (text[i] == '\n') line = result.size();
    else if (text[i] != ' ' && text[i] != '\t') line = result.npos;
  }
  return result;
}

/// Templates are programs in Jinja. Those of the ChatML family differ in spaces and quotes only, so that one form is
/// recognised, exactly, and nothing else is guessed at.
std::optional<ChatMl> recognise(std::string text) {
  // Space that the template does not print: beside trimming marks, after a block at the end of a line and before one at
  // its beginning (transformers sets trim_blocks and lstrip_blocks).
  text = replaced(text, "\r\n", "\n");
  text = tightened(text, {{"{%-", "{%"}, {"{{-", "{{"}}, kSpace, "");
  text = tightened(text, {{"-%}", "%}"}, {"-}}", "}}"}}, "", kSpace);
  text = without_indents(text);
  text = replaced(text, "%}\n", "%}");
  // Spelt alike: line breaks within texts as \n, one kind of quotes, no spaces around operators.
  text = replaced(text, "\n", "\\n");
  text = tightened(text, {{"{%", "{%"}, {"{{", "{{"}}, "", " ");
  text = tightened(text, {{"%}", "%}"}, {"}}", "}}"}}, " ", "");
  text = tightened(text, {{"+", "+"}, {"==", "=="}, {"!=", "!="}}, " ", " ");
  text = replaced(text, "\"", "'");
  text = replaced(text, "message.role", "message['role']");
  text = replaced(text, "message.content", "message['content']");
  static const std::string kLoop = "{%for message in messages%}",
                           kEnd = "{%endfor%}{%if add_generation_prompt%}{{'<|im_start|>assistant\\n'}}{%endif%}";
  static const std::string kBegin = "{%if loop.first and messages[0]['role']!='system'%}{{'<|im_start|>system\\n",
                           kBeginEnd = "<|im_end|>\\n'}}{%endif%}";
  static const std::string kTurn = "{{'<|im_start|>'+message['role']+'\\n'+message['content']+'<|im_end|>'+'\\n'}}",
                           kShortTurn = "{{'<|im_start|>'+message['role']+'\\n'+message['content']+'<|im_end|>\\n'}}";
  if (!text.starts_with(kLoop) || !text.ends_with(kEnd)) return std::nullopt;
  std::string_view middle(text);
  middle.remove_prefix(kLoop.size());
  middle.remove_suffix(kEnd.size());
  ChatMl result;
  if (middle.starts_with(kBegin)) {
    middle.remove_prefix(kBegin.size());
    const auto end = middle.find(kBeginEnd);
    if (end == std::string_view::npos || middle.substr(0, end).find_first_of("'+={}") != std::string_view::npos)
      return std::nullopt;  // what the lines above may have changed
    result.default_system = replaced(middle.substr(0, end), "\\n", "\n");
    middle.remove_prefix(end + kBeginEnd.size());
  }
  return middle == kTurn || middle == kShortTurn ? std::optional(result) : std::nullopt;
}

}  // namespace

std::string render_chat(const std::string& chat_template, const std::vector<ChatMessage>& messages,
                        bool add_generation_prompt) {
  if (chat_template.empty())
    throw CheckpointError(
        "Tokenizer::apply_chat_template: the tokenizer came without a chat template. Is it that of a base model? Build "
        "the prompt's text yourself.");
  const auto form = recognise(chat_template);
  if (!form)
    raise<CheckpointError>(
        "Tokenizer::apply_chat_template: the template is not of a known form, expected ChatML (<|im_start|>role ... "
        "<|im_end|>). Build the prompt's text yourself. It begins: {}",
        chat_template.substr(0, 200));
  std::string text;
  const auto turn = [&](const std::string& role, const std::string& content) {
    text.append("<|im_start|>").append(role).append("\n").append(content).append("<|im_end|>\n");
  };
  if (form->default_system && !messages.empty() && messages.front().role != "system")
    turn("system", *form->default_system);
  for (const auto& message : messages) turn(message.role, message.content);
  if (add_generation_prompt) text += "<|im_start|>assistant\n";
  return text;
}

}  // namespace accelerate::models
