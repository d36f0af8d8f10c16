// The messages of the chat that is shown, from the first one to the last.

import { $, el, on } from "../parts.js";
import { Answer, Question, Result } from "./message.js";

const KINDS = { user: Question, assistant: Answer, tool: Result };
const NEAR = 80; // pixels from the end within which the log follows a growing answer

const log = $("log");
const views = new Map(); // by the id of the message
let acts = null;

export const use = (made) => { acts = made; };

const complaints = []; // that stay until something is asked

export function complain(words) {
	const made = el("p", "err", words);
	made.role = "alert";
	complaints.push(made);
	log.append(made);
	follow();
}

export function forgive() {
	for (const one of complaints.splice(0)) one.remove();
}

const follow = () => log.scrollTo(0, log.scrollHeight);

// Draws a path of messages; `versionsOf` gives those of one, `turn` is the one that grows.
export function show(path, versionsOf, turn) {
	const stays = isAtEnd() || !path.some(({ id }) => views.has(id));
	const shown = new Set(path.map(({ id }) => id));
	for (const id of views.keys()) if (!shown.has(id)) views.delete(id);
	const boxes = path.map((node) => {
		const view = viewOf(node);
		const isGrowing = turn?.node === node;
		if (isGrowing) turn.view = { grow: () => schedule(view) };
		view.update(node, versionsOf(node), { isGrowing, isLast: node === path.at(-1) });
		return view.box;
	});
	const all = boxes.length ? boxes : [el("p", "none", "Ask something: your request is the bold one among those that run.")];
	all.push(...complaints);
	if (all.length !== log.children.length || all.some((box, i) => box !== log.children[i])) log.replaceChildren(...all);
	if (stays) follow();
}

function viewOf(node) {
	if (!views.has(node.id)) views.set(node.id, new KINDS[node.role](acts));
	return views.get(node.id);
}

export const edit = (node) => views.get(node.id)?.edit();

// Whether a message is being edited.
export const isEdited = () => log.querySelector(".editor") !== null;

const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;

// Drawing takes at most a third of the time.
function schedule(view) {
	view.frame ??= requestAnimationFrame(function draw(now) {
		if (now < (view.restsUntil || 0)) {
			view.frame = requestAnimationFrame(draw);
			return;
		}
		view.frame = null;
		const began = performance.now();
		const follows = isAtEnd();
		view.grow();
		if (follows) follow();
		const ended = performance.now();
		view.restsUntil = ended + 2 * (ended - began);
	});
}

// A grid would be copied with a line for each cell.
on("log", "copy", () => {
	log.dataset.copies = "";
	setTimeout(() => delete log.dataset.copies);
});
