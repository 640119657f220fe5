/* text/chat.h - a conversation to the model's prompt, and the model's output back to a message.
 *
 * Why      The format lives in the code of the model's release, not in a template; every byte
 *          counts. Encoding follows the release byte for byte. Parsing has two forms: a stream
 *          parser that takes whatever a model writes, and the release's strict one.
 * Rules    docs/chat.md: what a malformed call becomes, where reasoning goes, how a tool is forced.
 * Safety   A prompt is a list of segments. Only what the format itself writes may become control
 *          tokens; everything a caller sent is ordinary text, whatever it spells.
 * Owner    No globals; objects belong to their caller, one thread at a time.
 */
#ifndef TOW_TEXT_CHAT_H
#define TOW_TEXT_CHAT_H

#include "common/base/buf.h"
#include "common/text/tokenizer.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct json;
struct tow_err;

/* The control tokens of the format, as they are spelled. */
#define TEXT_BOS  "<｜begin▁of▁sentence｜>"
#define TEXT_EOS  "<｜end▁of▁sentence｜>"
#define TEXT_DSML "｜DSML｜"

/* ---- conversation to prompt ---- */

enum text_effort { TEXT_EFFORT_NONE, TEXT_EFFORT_HIGH, TEXT_EFFORT_MAX };

enum text_tool_choice {
    TEXT_TOOL_AUTO,     /* the model decides; without tools there are no calls */
    TEXT_TOOL_NONE,     /* tools are not shown, and markup of a call is ordinary text */
    TEXT_TOOL_REQUIRED, /* the turn opens with a call */
    TEXT_TOOL_NAMED,    /* the turn opens with a call of tool_name */
};

struct text_chat_options {
    bool thinking;      /* the last turn opens with <think> */
    bool keep_thinking; /* reasoning of earlier turns stays (drop_thinking off) */
    bool no_bos;
    bool as_release; /* as the release's encoder where an API is wiser or kinder: content parts of
                        other types become "[Unsupported TYPE]" in tool results instead of being
                        refused, and only its own effort names are known */
    enum text_effort effort;

    enum text_tool_choice tool_choice;
    const char *tool_name; /* borrowed; for TEXT_TOOL_NAMED */

    /* Of the request, all borrowed, NULL when absent. tools and response_format go onto the first
     * message if that is a system or developer message, else onto an empty system message put in
     * front. context: messages that are in the prompt already. */
    const struct json *tools;
    const struct json *response_format;
    const struct json *context;
};

/* Reads "none", "auto", "required" or {"type":"function","function":{"name":...}}; NULL or null is
 * auto. tool_name is borrowed from the value. */
int text_chat_set_tool_choice(struct text_chat_options *o, const struct json *value,
                              struct tow_err *err);
/* "high" and "max" as the release knows them. NULL is none, and so are, unless as_release is set,
 * the names of other APIs: none, minimal, low, medium. Anything else is TOW_EINVAL. */
int text_chat_set_effort(struct text_chat_options *o, const char *name, struct tow_err *err);

/* What the model is to write next, taken from the prompt that was really built. */
enum text_chat_start { TEXT_START_CONTENT, TEXT_START_REASONING };

struct text_chat_prompt {
    struct tow_buf text;       /* the whole prompt */
    struct text_segment *segs; /* owned array; bytes point into text; joined they are text */
    size_t n_segs;
    enum text_chat_start start; /* before `forced` */
    bool calls;                 /* markup of calls in the output is to be parsed */
    struct tow_buf forced;      /* end of the prompt that belongs to the answer; often empty */
};

/* messages is an array in the OpenAI shape. Caller frees with text_chat_prompt_fini(), also after a
 * failure. TOW_EINVAL names the field: "messages[2].role: ...". Tokenise segs as they are. */
int text_chat_encode(struct text_chat_prompt *out, const struct json *messages,
                     const struct text_chat_options *o, struct tow_err *err);
void text_chat_prompt_fini(struct text_chat_prompt *p);

/* ---- output to message: the stream parser ---- */

enum text_chat_event_kind {
    TEXT_EV_REASONING, /* text, len: more reasoning */
    TEXT_EV_CONTENT,   /* text, len: more content */
    TEXT_EV_CALL,      /* index, name: a complete call follows at once */
    TEXT_EV_ARGUMENTS, /* index, text, len: its arguments, whole, a JSON object */
    TEXT_EV_MALFORMED, /* text: reason, static. Its raw text follows as content or reasoning */
    TEXT_EV_CUT,       /* text, len: begin of a call that the end of output cut off; dropped */
};

struct text_chat_event {
    enum text_chat_event_kind kind;
    const char *text; /* valid during the callback only; NUL-terminated */
    size_t len;
    const char *name; /* TEXT_EV_CALL; NUL-terminated UTF-8 */
    size_t name_len;
    uint32_t index; /* of the call in its message */
};

typedef void (*text_chat_on_event)(void *arg, const struct text_chat_event *ev);

struct text_chat_parser; /* one per answer */

/* tools (borrowed, may be NULL) are the request's; they only decide whether a wrapper parameter
 * named "arguments" or "input" is taken off. Starts as the prompt says, forced text included. */
int text_chat_parser_new(struct text_chat_parser **out, const struct text_chat_prompt *prompt,
                         const struct json *tools, struct tow_err *err);
/* The same by hand: for tests and for text that has no prompt of ours. */
int text_chat_parser_open(struct text_chat_parser **out, enum text_chat_start start, bool calls,
                          const struct json *tools, struct tow_err *err);
void text_chat_parser_free(struct text_chat_parser *p); /* NULL is fine */

/* Takes whole characters, any number; calls on_event for what is certain. The sum of the events
 * does not depend on how the text was split. 0 or TOW_ENOMEM. */
int text_chat_parser_feed(struct text_chat_parser *p, const char *text, size_t len,
                          text_chat_on_event on_event, void *arg);
/* The end. whole: the model ended its turn (EOS). Otherwise it was cut (length, stop string). */
int text_chat_parser_end(struct text_chat_parser *p, bool whole, text_chat_on_event on_event,
                         void *arg);
bool text_chat_parser_reasoning(const struct text_chat_parser *p);   /* what comes next counts so */
uint32_t text_chat_parser_n_calls(const struct text_chat_parser *p); /* complete so far */

/* ---- output to message: whole ---- */

struct text_chat_call {
    struct tow_buf name, arguments;
};

struct text_chat_message {
    struct tow_buf reasoning, content;
    struct text_chat_call *calls; /* owned */
    uint32_t n_calls, calls_cap;
    bool failed; /* memory ran out */
};

void text_chat_message_init(struct text_chat_message *m);
void text_chat_message_fini(struct text_chat_message *m);
/* A text_chat_on_event that gathers the events; arg is the message. */
void text_chat_message_add(void *arg, const struct text_chat_event *ev);

/* The release's own parser: text with its EOS. TOW_EFORMAT, with the byte offset, for anything it
 * does not accept. Arguments flagged as JSON are copied unchecked. m must be initialised. */
int text_chat_parse_strict(struct text_chat_message *m, const char *text, size_t len, bool thinking,
                           struct tow_err *err);

#endif
