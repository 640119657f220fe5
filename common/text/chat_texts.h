/* text/chat_texts.h - the fixed texts of the prompt format, byte for byte as the model was trained.
 *
 * Why      They are quoted from the format, so they stand apart from the code and are never edited.
 */
#ifndef TOW_TEXT_CHAT_TEXTS_H
#define TOW_TEXT_CHAT_TEXTS_H

extern const char text_chat_effort_max[];  /* before everything, when the effort is max */
extern const char text_chat_tools_head[];  /* then the schemas, one a line, */
extern const char text_chat_tools_tail[];  /* then this */
extern const char text_chat_format_head[]; /* then the schema of the answer */

#endif
