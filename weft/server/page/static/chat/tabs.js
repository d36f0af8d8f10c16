// What the tabs of one browser tell each other: which chats have changed, and which answers are on
// their way.

const CHANNEL = "weft-chats";
const ANSWER_MS = 300; // that a tab has to say that an answer is on its way there

const channel = new BroadcastChannel(CHANNEL);
const acts = { changed() {}, asked() {}, runs() {} };
channel.onmessage = ({ data: [what, id] }) => acts[what]?.(id);

export const say = (what, id) => channel.postMessage([what, id]);

// `changed`: a chat; `asked`: who has the chat; `runs`: the answer that is on its way in a chat.
export const on = (what, act) => { acts[what] = act; };

const elsewhere = new Set(); // ids of answers

on("runs", (id) => {
	elsewhere.add(id);
	told?.();
});

let told = null;

// Which of the answers of a chat come in other tabs. Those without an end that are not among them were
// cut, as far as is known after a moment.
export async function running(chat, ids) {
	for (const id of ids) elsewhere.delete(id); // their tab may have been closed since
	say("asked", chat);
	await new Promise((done) => {
		const timer = setTimeout(done, ANSWER_MS);
		told = () => {
			if (!ids.every((id) => elsewhere.has(id))) return;
			clearTimeout(timer);
			done();
		};
	});
	return elsewhere;
}
