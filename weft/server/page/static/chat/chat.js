// The chat that is shown: what is said, asked again, edited, continued and stopped, each answer
// streamed by the OpenAI API as every client uses it.

import { $, on, tell } from "../parts.js";
import * as branches from "./branches.js";
import * as list from "./list.js";
import * as log from "./log.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import * as tabs from "./tabs.js";
import * as tools from "./tools.js";
import * as writer from "./writer.js";
import { bodyOf, continued, isElsewhere } from "./request.js";
import { Turn } from "./turn.js";

let model = "";
let chat = null;
let nodes = new Map();
const running = new Map(); // turns by the id of their chat

// Sets the facts about the server: at least the model.
export function introduce(facts) {
	model = facts.model;
	writer.introduce(facts);
	settings.introduce(facts);
	tools.introduce(facts);
}

// Returns whether an answer was stopped.
export function stop() {
	const turn = running.get(chat?.id);
	turn?.stop();
	return turn !== undefined;
}

export const complain = log.complain;

// ---- chats

// A new chat begins with the settings of the last one.
function fresh() {
	return { id: store.newId(), title: "", at: Date.now(), leaf: null, settings: structuredClone(chat?.settings || {}) };
}

export async function open(id) {
	log.forgive();
	const found = id && await store.chat(id);
	chat = found || { ...fresh(), ...(id && { id }) }; // a draft belongs to the id
	nodes = found ? await store.nodes(chat.id) : new Map();
	await closeLeft();
	localStorage.setItem("weft-chat", chat.id);
	settings.show(chat.settings);
	tools.show(chat.settings);
	writer.show(chat.id);
	show();
	list.mark(chat.id);
}

// What was streaming when its page was closed has ended, unless it comes in another tab.
async function closeLeft() {
	const turn = running.get(chat.id);
	if (turn) nodes.set(turn.node.id, turn.node);
	const open = [...nodes.values()].filter((node) => node.role === "assistant" && !node.end && !node.error && node !== turn?.node);
	if (!open.length) return;
	const elsewhere = await tabs.running(chat.id, open.map(({ id }) => id));
	for (const node of open) {
		node.end = elsewhere.has(node.id) ? "elsewhere" : "left";
		if (!isElsewhere(node)) store.saveNode(node);
	}
}

// Another tab has changed a chat: it is shown as it is now, except while something is done with it here.
async function renew(id) {
	list.draw();
	if (id !== chat.id || running.has(id) || log.isEdited()) return;
	const now = await store.chat(id);
	const found = await store.nodes(id);
	if (!now || id !== chat.id || running.has(id) || log.isEdited()) return;
	const { leaf, title, at } = now;
	Object.assign(chat, { leaf, title, at });
	nodes = found;
	await closeLeft();
	if (id === chat.id) show();
}

function show() {
	const path = branches.pathTo(nodes, chat.leaf);
	log.show(path, (node) => branches.versions(nodes, node), running.get(chat.id));
	tell("chat-title", chat.title || "New chat");
	busy();
	const last = path.at(-1);
	if (last) tools.ask(last, path);
}

function busy() {
	const isBusy = running.has(chat.id);
	$("stop").hidden = !isBusy;
	$("send").hidden = isBusy;
}

function keep() {
	chat.at = Date.now();
	return store.save(chat).then(list.draw);
}

function add(node) {
	const made = { id: store.newId(), chat: chat.id, parent: chat.leaf, text: "", at: Date.now(), ...node };
	nodes.set(made.id, made);
	chat.leaf = made.id;
	return made;
}

// ---- turns

function send(text, files) {
	if (running.has(chat.id)) return false;
	if (chat.leaf && isElsewhere(nodes.get(chat.leaf))) {
		log.complain("the last answer comes in another tab: wait for its end, or stop it there");
		return false;
	}
	const asked = prepared(() => bodyOf([], chat.settings, model));
	if (!asked) return false;
	chat.title ||= branches.titleOf(text || files[0]?.name || "");
	store.saveNode(add({ role: "user", text, files }));
	answer();
	return true;
}

// What is wrong with the settings is said before anything is asked.
function prepared(act) {
	try {
		return act();
	} catch (error) {
		log.complain(error.message);
		return null;
	}
}

function answer() {
	const path = branches.pathTo(nodes, chat.leaf);
	const body = prepared(() => ({ ...bodyOf(path, chat.settings, model), ...tools.fields() }));
	if (!body) return show();
	run(add({ role: "assistant", model }), body);
}

function goOn(node) {
	const path = branches.pathTo(nodes, node.id);
	const body = prepared(() => continued(bodyOf(path, chat.settings, model)));
	if (!body) return;
	delete node.end;
	delete node.error;
	run(node, body);
}

async function run(node, body) {
	const of = chat;
	const turn = new Turn(node, body);
	running.set(of.id, turn);
	log.forgive();
	keep();
	show();
	await turn.run();
	running.delete(of.id);
	list.draw();
	if (of !== chat) return;
	show();
	$("text").focus({ preventScroll: true });
}

// ---- actions on messages

const acts = {
	again(node) {
		chat.leaf = node.parent;
		if (node.error && !node.text) forget([node.id]);
		answer();
	},
	goOn,
	edit(node, text) {
		chat.leaf = node.parent;
		const { role, files, model: by, end } = node;
		store.saveNode(add(role === "user" ? { role, text, files } : { role, text, model: by, end: end || "stop" }));
		keep();
		if (role === "user") answer();
		else show();
	},
	pick(node) {
		chat.leaf = branches.newest(nodes, node.id);
		keep();
		show();
	},
	async branch(node) {
		const path = branches.pathTo(nodes, node.id);
		const copy = { ...fresh(), title: `${chat.title} (branch)`, settings: structuredClone(chat.settings) };
		let parent = null;
		for (const one of path) {
			const made = { ...structuredClone(one), id: store.newId(), chat: copy.id, parent };
			await store.saveNode(made);
			parent = made.id;
		}
		await store.save({ ...copy, leaf: parent });
		await open(copy.id);
		list.draw();
	},
	remove(node) {
		const others = branches.versions(nodes, node).filter((one) => one !== node);
		forget(branches.below(nodes, node.id));
		chat.leaf = others.length ? branches.newest(nodes, others.at(-1).id) : node.parent;
		keep();
		show();
	},
};

function forget(ids) {
	for (const id of ids) nodes.delete(id);
	store.removeNodes(chat.id, ids);
}

// All calls of the last answer have their results.
tools.onResults((results) => {
	for (const result of results) store.saveNode(add({ role: "tool", ...result }));
	answer();
});

// ---- start

export async function start() {
	store.watch(log.complain, renew);
	tabs.on("asked", (id) => { if (running.has(id)) tabs.say("runs", running.get(id).node.id); });
	log.use(acts);
	writer.use(send);
	settings.onChange(() => keep());
	list.use({ open, isBusy: (id) => running.has(id), renamed(id, title) { if (id === chat.id) { chat.title = title; show(); } } });
	on("stop", "click", stop);
	on("chat-new", "click", () => open().then(() => $("text").focus()));
	await open(localStorage.getItem("weft-chat"));
	await list.draw();
}

// Repeats the last answer, or edits the last question.
export function last(what) {
	const path = branches.pathTo(nodes, chat.leaf);
	if (running.has(chat.id)) return;
	const node = path.findLast(({ role }) => role === (what === "edit" ? "user" : "assistant"));
	if (node && what === "edit") log.edit(node);
	else if (node) acts.again(node);
}
