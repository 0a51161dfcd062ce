"""Faults in generation and tokenizers."""
from faults import F

# ---- generation
file = "src/models/generation/beam_search.cpp"
parity = "generate_tests GenerateParity.GreedyAndBeamsOfLlamaGpt2AndT5"
F("GenerationConfig::early_stopping never", file,
  "= «config.early_stopping == EarlyStopping::never» && config.length_penalty", "false", parity)
F("GenerationConfig::early_stopping", file, "(all_full && «config.early_stopping == EarlyStopping::yes»)", "false",
  parity)
F("GenerationConfig::early_stopping", file,
  "!row.improvable || («config.early_stopping == EarlyStopping::yes» && full(row))", "false", parity)
F("GenerationConfig::length_penalty", file, "static_cast<double>(length), «config.length_penalty»", "1.0", parity)
F("GenerationConfig::num_beams", "src/models/generation/generate.cpp", "if («config.num_beams > 1») {", "false", parity)
file = "src/models/generation/logits.cpp"
scores = "generate_tests GenerateParity.ScoresAreProcessedAlike"
F("GenerationConfig::repetition_penalty", file, "if («config.repetition_penalty != 1»)", "false", scores)
F("GenerationConfig::min_new_tokens", file, "if (new_tokens < «config.min_new_tokens»)", "int64_t{0}",
  "generate_tests Generate.GreedyStopsAtEndTokensAndPads")
F("GenerationConfig::temperature", file, "if («config.temperature != 1»)", "false", scores)
F("GenerationConfig::top_k", file, "if («config.top_k > 0»)", "false", scores)
F("GenerationConfig::top_p", file, "if («config.top_p < 1»)", "false", scores)

x = "generate_tests Generate."
file = "src/models/generation/generate.cpp"
F("GenerationConfig::do_sample", file, "auto chosen = «config.do_sample» ?", "false", x + "DrawsFromTheDistribution")
F("GenerationConfig::eos_token_id", file, "if («!config.eos_token_id.empty()») ended |=", "false",
  x + "GreedyStopsAtEndTokensAndPads")
F("GenerationConfig::pad_token_id", file,
  "padding = «config.pad_token_id.value_or(config.eos_token_id.empty() ? 0 : config.eos_token_id.front())»;",
  "int64_t{1}", x + "GreedyStopsAtEndTokensAndPads")
F("GenerationConfig::max_new_tokens", file, "prompt + «*config.max_new_tokens» :", "int64_t{1}",
  x + "GreedyStopsAtEndTokensAndPads")
F("GenerationConfig::max_length", file, ": «*config.max_length»;", "prompt + 1", x + "GreedyStopsAtEndTokensAndPads")
F("GenerationConfig::stop_strings", "src/models/generation/stop_strings.cpp", "strings_(«config.stop_strings»)",
  "decltype(config.stop_strings)()", x + "StopStringsEndRowsWithTheirToken")
F("GenerateOptions::attention_mask", file, "without_padding(input_ids, «options.attention_mask»)", "at::Tensor()",
  x + "PaddingIsNoRepetition")
F("GenerateOptions::generator", file, "/*replacement=*/false, «options.generator»)", "std::optional<at::Generator>()",
  x + "ASeedGivesTheSameTokens")
F("GenerateOptions::on_tokens", file, "if («options.on_tokens && !options.on_tokens(chosen)») break;", "false",
  x + "CallbackSeesTokensAndCanStop")
F("GenerateOptions::tokenizer", file, "stops(config, «options.tokenizer»);", "decltype(options.tokenizer)()",
  x + "StopStringsEndRowsWithTheirToken")
F("GenerateOptions::on_layer", file, "max_length, «options.on_layer»);", "std::function<void(int64_t)>()",
  "generate_tests Generate.ShowsHowFarTheReadingIs")
F("GenerateOptions::max_positions", file,
  "«if (options.max_positions) check_context(prompt, max_length, *options.max_positions);»", "",
  x + "TheEndOfTheContextIsAnError")

# ---- WordPiece
file = "src/models/wordpiece.cpp"
words = "options_tests OptionsOfModels.WordPiece"
F("WordPieceOptions::unk_token", file, "unk = ids.at(«options.unk_token»);", 'std::string("[UNK]")', words)
F("WordPieceOptions::cls_token", file, "cls = ids.at(«options.cls_token»);", 'std::string("[CLS]")', words)
F("WordPieceOptions::sep_token", file, "sep = ids.at(«options.sep_token»);", 'std::string("[SEP]")', words)
F("WordPieceOptions::pad_token", file, "pad = ids.at(«options.pad_token»);", 'std::string("[PAD]")', words)
F("WordPieceOptions::mask_token", file, "options.pad_token, «options.mask_token»};", "options.pad_token", words)
F("WordPieceOptions::additional_special_tokens", file,
  "«named.insert(named.end(), options.additional_special_tokens.begin(), options.additional_special_tokens.end());»", "", words)
F("WordPieceOptions::clean_up_tokenization_spaces", file, "if («options().clean_up_tokenization_spaces»)", "false", words)
F("WordPieceOptions::max_input_chars_per_word", file, "code_points(word) > «options.max_input_chars_per_word»",
  "int64_t{100}", words)
F("WordPieceOptions::tokenize_chinese_chars", file,
  "value_or(options.do_lower_case), «options.tokenize_chinese_chars»}", "true", words)
F("WordPieceOptions::do_lower_case", file, "{«options.do_lower_case», options.strip_accents.value_or", "true",
  "wordpiece_tests WordPiece.CasedModelsKeepCaseAndAccents")
F("WordPieceOptions::strip_accents", file, "«options.strip_accents.value_or(options.do_lower_case)», options.tokenize",
  "options.do_lower_case", "wordpiece_tests WordPiece.CasedModelsKeepCaseAndAccents")
F("WordPieceOptions::model_max_length", file, "how.max_length.value_or(«options.model_max_length»);", "int64_t{512}",
  "wordpiece_tests WordPiece.TemplatesTruncationAndPadding")
F("EncodeOptions::truncation", file, "if («how.truncation») {", "false",
  "wordpiece_tests WordPiece.TemplatesTruncationAndPadding")
F("EncodeOptions::padding", file, "if («how.padding == Padding::max_length» &&", "false",
  "wordpiece_tests WordPiece.TemplatesTruncationAndPadding")
F("EncodeOptions::add_special_tokens", file, "if («how.add_special_tokens») ids.push_back(cls);", "true",
  "wordpiece_tests WordPiece.TemplatesTruncationAndPadding")
