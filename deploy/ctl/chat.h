/* ctl/chat.h - `towpath-ctl chat`: one question, or a conversation,
 * over the API that clients use. */
#ifndef CTL_CHAT_H
#define CTL_CHAT_H

int ctl_chat_main(int argc, char **argv);

#endif
